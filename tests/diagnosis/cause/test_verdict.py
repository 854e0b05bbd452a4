from __future__ import annotations

import dataclasses

import pytest

from mmdet_nanfix.diagnosis.cause.symptoms import Symptom
from mmdet_nanfix.diagnosis.cause.verdict import (
    CauseEvidence,
    select_remedy,
    verdict,
)
from mmdet_nanfix.diagnosis.findings import (
    Counterfactual,
    Experiment,
    Failure,
    Findings,
)
from mmdet_nanfix.guard import Remedy
from mmdet_nanfix.incidents import Cause
from mmdet_nanfix.incidents.codes import TITLES

CURED = Experiment(True, 'it does not come')
STAYS = Experiment(False, 'it comes')
BAD, FINE = Symptom(True, 'it is bad'), Symptom(False, 'it is fine')


def shown(failed='loss', phase='forward', cured=(), stays=(), bad=(),
          fine=(), **others):
    experiments = {Counterfactual(name): CURED for name in cured}
    experiments.update({Counterfactual(name): STAYS
                        for name in ('first', *stays) if name not in cured})
    symptoms = {name: BAD for name in bad}
    symptoms.update({name: FINE for name in fine})
    return CauseEvidence(
        failed=Failure(failed) if failed else None, phase=phase,
        experiments=experiments, symptoms=symptoms, **others)


# What was shown, the code, and for each replay that decides the code with its
# outcome the other way round.
TABLE = {
    'a scale that is too high': (
        shown('grads', 'backward', ['lower scale'], fine=['norm']), 'NF101',
        {'lower scale': 'NF113'}),
    'gradients at any scale, in half only': (
        shown('grads', 'backward', ['part in fp32'], ['lower scale']),
        'NF102', {'part in fp32': 'NF113'}),
    'a part': (shown(cured=['part in fp32']), 'NF102',
               {'part in fp32': 'NF113'}),
    'more than a part': (
        shown(cured=['all in fp32'], stays=['part in fp32']), 'NF102',
        {'all in fp32': 'NF107'}),
    'a loss': (shown(phase='loss', cured=['losses in fp32']), 'NF103',
               {'losses in fp32': 'NF113'}),
    'a target': (
        shown(phase='loss', cured=['heads in fp32'],
              stays=['losses in fp32']), 'NF103',
        {'heads in fp32': 'NF113'}),
    'a loss that only all of it helps': (
        shown(phase='loss', cured=['all in fp32'], stays=[
            'heads in fp32', 'part in fp32']), 'NF103',
        {'all in fp32': 'NF107'}),
    'an annotation': (
        shown(phase='loss', cured=['annotation repaired']), 'NF104',
        {'annotation repaired': 'NF113'}),
    'an annotation that fp32 would bear': (
        shown(phase='loss', cured=['annotation repaired', 'all in fp32']),
        'NF104', {'annotation repaired': 'NF103'}),
    'a label': (
        shown('raised', 'loss', ['annotation repaired'], label=True),
        'NF106', {'annotation repaired': 'NF113'}),
    'pixels that were given': (
        shown(phase='input', given='input'), 'NF105', {'first': 'NF113'}),
    'pixels that are too large': (
        shown(cured=['pixels repaired'], stays=['part in fp32']), 'NF105',
        {'pixels repaired': 'NF113'}),
    'a normalization': (
        shown(cured=['normalised']), 'NF105', {'normalised': 'NF113'}),
    'full precision': (
        shown(stays=['part in fp32', 'all in fp32']), 'NF107',
        {'all in fp32': 'NF102'}),
    'a term': (
        shown('grads', 'backward', ['term lowered', 'lower scale']), 'NF108',
        {'term lowered': 'NF101'}),
    'exploding gradients': (
        shown('grads', 'backward', ['lower scale'], bad=['norm']), 'NF108',
        {'lower scale': 'NF113'}),
    'weights that were thrown away': (
        shown(cured=['part in fp32'], bad=['update']), 'NF108',
        {'first': 'NF113'}),
    'diverged': (
        shown(cured=['part in fp32'], bad=['growth', 'norm']), 'NF108',
        {'first': 'NF113'}),
    'grown, but a part in fp32 has a gradient like any': (
        shown(cured=['part in fp32'], bad=['growth'], fine=['norm']), 'NF102',
        {'part in fp32': 'NF113'}),
    'grown, but a lower scale has a gradient like any': (
        shown('grads', 'backward', ['lower scale'], bad=['growth'],
              fine=['norm']), 'NF101', {'lower scale': 'NF113'}),
    'a learning rate that spoils weights': (
        shown('loss', 'step', given='weight', by_step=True,
              fine=['moments'], bad=['update']), 'NF108',
        {'first': 'NF113'}),
    'weights': (shown(phase='params', given='weight'), 'NF109',
                {'first': 'NF113'}),
    'buffers': (shown(phase='buffers', given='buffer'), 'NF110',
                {'first': 'NF113'}),
    'moments': (
        shown('loss', 'step', given='weight', by_step=True, bad=['moments']),
        'NF111', {'first': 'NF113'}),
    'eps': (
        shown('loss', 'step', given='weight', by_step=True, bad=['eps']),
        'NF111', {'first': 'NF113'}),
    'two replays that disagree': (
        shown(None, cured=['first'], stays=['again']), 'NF112',
        {'first': 'NF113', 'again': 'NF113'}),
    'a control that disagrees': (
        shown(cured=['part in fp32', 'again']), 'NF112', {'again': 'NF102',
                                                         'first': 'NF113'}),
    'nothing': (shown(stays=['part in fp32']), 'NF113', {}),
}


def flipped(said, name):
    name = Counterfactual(name)
    experiments = dict(said.experiments)
    experiments[name] = dataclasses.replace(
        experiments[name], cured=not experiments[name].cured)
    return dataclasses.replace(said, experiments=experiments)


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
    for other in told & {name.value for name in said.experiments}:
        # A control decides where it disagrees.
        assert verdict(flipped(said, other))[0] != code, other


def test_every_cause_but_none_is_reached():
    assert {code for _, code, _ in TABLE.values()} == set(TITLES)


def test_symptoms_that_decide_are_told():
    said = shown(stays=['part in fp32'], bad=['growth'], fine=['update'])
    code, evidence = verdict(said)
    assert code == 'NF108'
    assert 'growth: it is bad' in evidence and 'update: it is fine' not in (
        evidence)
    # Without it, it is what the replay says.
    assert verdict(shown(stays=['part in fp32']))[0] == 'NF113'


def test_nothing_at_all_is_an_answer():
    assert verdict(CauseEvidence()) == ('NF113', [])


def test_weights_that_are_bad_need_no_replay():
    assert verdict(CauseEvidence(phase='params', given='weight'))[0] == 'NF109'


def cause(code):
    return Cause(code, [], '')


@pytest.mark.parametrize('code, found, wanted', [
    ('NF101', dict(fits=64.), Remedy('retried', 64.)),
    ('NF101', dict(), None),
    ('NF102', dict(part='rpn_head', proven={'part in fp32'}),
     Remedy('rescued_fp32_head', None, ('rpn_head', ))),
    ('NF102', dict(part='rpn_head', fits=8., proven={'part in fp32'}),
     Remedy('rescued_fp32_head', 8., ('rpn_head', ))),
    # The loss was finite, but something after it was not.
    ('NF102', dict(part='rpn_head'), None),
    ('NF103', dict(mode='losses', proven={'losses in fp32'}),
     Remedy('rescued_fp32_head', None, ('losses', ))),
    ('NF108', dict(fits=64.), None), ('NF104', dict(fits=64.), None),
    ('NF105', dict(part='backbone', proven={'part in fp32'}), None),
])
def test_the_remedy_is_what_the_evidence_is_for(code, found, wanted):
    found = {**found, 'proven': set(map(
        Counterfactual, found.get('proven', ())))}
    findings = Findings(norm=1., **found)
    assert select_remedy(cause(code), findings, lambda norm: True) == wanted
    # Absurd, or nothing to compare with.
    assert select_remedy(cause(code), findings, lambda norm: False) is None
    assert select_remedy(cause(code), findings, lambda norm: None) is None
    assert select_remedy(None, findings, lambda norm: True) is None
    assert select_remedy(cause(code), Findings(**found),
                         lambda norm: True) is None
