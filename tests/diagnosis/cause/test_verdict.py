from __future__ import annotations

import dataclasses

import pytest

from mmdet_nanfix.diagnosis.cause.verdict import (
    Facts,
    Reading,
    Replay,
    verdict,
)
from mmdet_nanfix.incidents.codes import TITLES

GONE, STAYS = Replay(True, 'it does not come'), Replay(False, 'it comes')
BAD, FINE = Reading(True, 'it is bad'), Reading(False, 'it is fine')


def facts(failed='loss', phase='forward', gone=(), stays=(), bad=(),
          fine=(), **others):
    replays = {name: GONE for name in gone}
    replays.update({name: STAYS for name in ('first', *stays)
                    if name not in gone})
    readings = {name: BAD for name in bad}
    readings.update({name: FINE for name in fine})
    return Facts(failed=failed, phase=phase, replays=replays,
                 readings=readings, **others)


# Facts, the code, and for each replay that decides the code with its
# outcome the other way round.
TABLE = {
    'a scale that is too high': (
        facts('grads', 'backward', ['lower scale'], fine=['norm']), 'NF101',
        {'lower scale': 'NF113'}),
    'gradients at any scale, in half only': (
        facts('grads', 'backward', ['part in fp32'], ['lower scale']),
        'NF102', {'part in fp32': 'NF113'}),
    'a part': (facts(gone=['part in fp32']), 'NF102',
               {'part in fp32': 'NF113'}),
    'more than a part': (
        facts(gone=['all in fp32'], stays=['part in fp32']), 'NF102',
        {'all in fp32': 'NF107'}),
    'a loss': (facts(phase='loss', gone=['losses in fp32']), 'NF103',
               {'losses in fp32': 'NF113'}),
    'a target': (
        facts(phase='loss', gone=['heads in fp32'],
              stays=['losses in fp32']), 'NF103',
        {'heads in fp32': 'NF113'}),
    'a loss that only all of it helps': (
        facts(phase='loss', gone=['all in fp32'], stays=[
            'heads in fp32', 'part in fp32']), 'NF103',
        {'all in fp32': 'NF107'}),
    'an annotation': (
        facts(phase='loss', gone=['annotation repaired']), 'NF104',
        {'annotation repaired': 'NF113'}),
    'an annotation that fp32 would bear': (
        facts(phase='loss', gone=['annotation repaired', 'all in fp32']),
        'NF104', {'annotation repaired': 'NF103'}),
    'a label': (
        facts('raised', 'loss', ['annotation repaired'], label=True),
        'NF106', {'annotation repaired': 'NF113'}),
    'pixels that were given': (
        facts(phase='input', given='input'), 'NF105', {'first': 'NF113'}),
    'pixels that are too large': (
        facts(gone=['pixels repaired'], stays=['part in fp32']), 'NF105',
        {'pixels repaired': 'NF113'}),
    'a normalization': (
        facts(gone=['normalised']), 'NF105', {'normalised': 'NF113'}),
    'full precision': (
        facts(stays=['part in fp32', 'all in fp32']), 'NF107',
        {'all in fp32': 'NF102'}),
    'a term': (
        facts('grads', 'backward', ['term lowered', 'lower scale']), 'NF108',
        {'term lowered': 'NF101'}),
    'exploding gradients': (
        facts('grads', 'backward', ['lower scale'], bad=['norm']), 'NF108',
        {'lower scale': 'NF113'}),
    'weights that were thrown away': (
        facts(gone=['part in fp32'], bad=['update']), 'NF108',
        {'first': 'NF113'}),
    'diverged': (
        facts(gone=['part in fp32'], bad=['growth', 'norm']), 'NF108',
        {'first': 'NF113'}),
    'grown, but a part in fp32 has a gradient like any': (
        facts(gone=['part in fp32'], bad=['growth'], fine=['norm']), 'NF102',
        {'part in fp32': 'NF113'}),
    'grown, but a lower scale has a gradient like any': (
        facts('grads', 'backward', ['lower scale'], bad=['growth'],
              fine=['norm']), 'NF101', {'lower scale': 'NF113'}),
    'a learning rate that spoils weights': (
        facts('loss', 'step', given='weight', by_step=True,
              fine=['moments'], bad=['update']), 'NF108',
        {'first': 'NF113'}),
    'weights': (facts(phase='params', given='weight'), 'NF109',
                {'first': 'NF113'}),
    'buffers': (facts(phase='buffers', given='buffer'), 'NF110',
                {'first': 'NF113'}),
    'moments': (
        facts('loss', 'step', given='weight', by_step=True, bad=['moments']),
        'NF111', {'first': 'NF113'}),
    'eps': (
        facts('loss', 'step', given='weight', by_step=True, bad=['eps']),
        'NF111', {'first': 'NF113'}),
    'two replays that disagree': (
        facts(None, gone=['first'], stays=['again']), 'NF112',
        {'first': 'NF113', 'again': 'NF113'}),
    'a control that disagrees': (
        facts(gone=['part in fp32', 'again']), 'NF112', {'again': 'NF102',
                                                         'first': 'NF113'}),
    'nothing': (facts(stays=['part in fp32']), 'NF113', {}),
}


def flipped(said, name):
    replays = dict(said.replays)
    replays[name] = dataclasses.replace(
        replays[name], gone=not replays[name].gone)
    return dataclasses.replace(said, replays=replays)


@pytest.mark.parametrize('name', TABLE)
def test_the_verdict_is_what_replays_have_shown(name):
    said, code, others = TABLE[name]
    found, evidence = verdict(said)
    assert found == code
    # What decides is told; with another outcome it is another verdict.
    told = {line.partition(': ')[0] for line in evidence}
    assert set(others) <= told
    for other, wanted in others.items():
        assert verdict(flipped(said, other))[0] == wanted != code


@pytest.mark.parametrize('name', [name for name in TABLE if name != 'nothing'])
def test_no_replay_is_told_that_does_not_matter(name):
    said, code, _ = TABLE[name]
    _, evidence = verdict(said)
    told = {line.partition(': ')[0] for line in evidence}
    for other in told & set(said.replays):
        # A control decides where it disagrees.
        assert verdict(flipped(said, other))[0] != code, other


def test_every_cause_but_none_is_reached():
    assert {code for _, code, _ in TABLE.values()} == set(TITLES)


def test_readings_that_decide_are_told():
    said = facts(stays=['part in fp32'], bad=['growth'], fine=['update'])
    code, evidence = verdict(said)
    assert code == 'NF108'
    assert 'growth: it is bad' in evidence and 'update: it is fine' not in (
        evidence)
    # Without it, it is what the replay says.
    assert verdict(facts(stays=['part in fp32']))[0] == 'NF113'


def test_nothing_at_all_is_an_answer():
    assert verdict(Facts()) == ('NF113', [])


def test_weights_that_are_bad_need_no_replay():
    assert verdict(Facts(phase='params', given='weight'))[0] == 'NF109'
