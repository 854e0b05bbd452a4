from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch
from helpers.guards import FakeRanks, parts_of
from helpers.toy import ToyDetector, toy_batch
from helpers.training import train, wrap
from mmengine.logging import MessageHub

from mmdet_nanfix.diagnosis.cause.symptoms import Symptoms
from mmdet_nanfix.diagnosis.context import RunContext
from mmdet_nanfix.diagnosis.diagnose import Diagnostician
from mmdet_nanfix.diagnosis.findings import (
    Failure,
    Findings,
    ReplayStatus,
)
from mmdet_nanfix.diagnosis.parts import ModelParts
from mmdet_nanfix.guard import CapturedForward, Evidence, MicroStep
from mmdet_nanfix.guard.state import BatchSnapshot, Rng
from mmdet_nanfix.hosts.mmengine.reporter import IncidentReporter


def incidents_of(*batches, model=None, after=None, **settings):
    torch.manual_seed(0)
    MessageHub._instance_dict.clear()
    model = model or ToyDetector()
    wrapper = wrap(model, **settings)
    wrapper.initialize_count_status(model, 0, 99)
    found = []
    with mock.patch.object(IncidentReporter, 'report', (
            lambda self, incident: found.append(incident))):
        for index, batch in enumerate(batches):
            if after is not None and index == 1:
                after(model, wrapper)
            train(model, wrapper, batch)
    return found


def cause_of(*args, **kwargs):
    return incidents_of(*args, **kwargs)[0].cause


def test_a_factor_that_is_nan_is_an_input():
    """In batches of other projects ``inputs`` is the input."""
    cause = cause_of(toy_batch(x=math.nan))
    assert cause.code == 'NF105' and cause.evidence


def test_weights_that_came_in_bad():
    def spoil(model):
        with torch.no_grad():
            model.rpn_head.out.bias.fill_(math.nan)
        return model

    torch.manual_seed(0)
    cause = cause_of(toy_batch(), model=spoil(ToyDetector()))
    assert cause.code == 'NF109' and 'rpn_head.out' in cause.advice
    assert cause.evidence[0].startswith('first: ')


@pytest.mark.parametrize('settings', [
    {}, dict(type='NanSafeOptimWrapper')])
def test_weights_that_an_update_has_spoiled(settings):
    def spoil(model, wrapper):
        with torch.no_grad():
            model.rpn_head.out.bias.fill_(math.nan)

    cause = cause_of(toy_batch(), toy_batch(), after=spoil, **settings)
    assert cause.code == 'NF108'
    assert any(line.startswith('update: ') for line in cause.evidence)


def test_without_a_replay_what_is_bad_as_it_stands_is_told():
    def spoil(model, wrapper):
        with torch.no_grad():
            model.rpn_head.out.bias.fill_(math.nan)

    cause = cause_of(toy_batch(), toy_batch(), after=spoil,
                     nanfix=dict(max_incidents=0))
    assert cause.code == 'NF108' and 'replay' not in cause.evidence


def test_no_replay_and_nothing_bad_as_it_stands():
    cause = cause_of(toy_batch(rpn=math.nan), nanfix=dict(max_incidents=0))
    assert cause.code == 'NF113'
    assert 'there were too many before' in cause.advice


class Chance(ToyDetector):
    """Fails now and then, whatever the batch and the generators."""

    def __init__(self, pattern):
        super().__init__()
        self.__dict__['pattern'] = iter(pattern)

    def forward(self, inputs, data_samples=None, mode='loss'):
        losses = super().forward(inputs, data_samples, mode)
        fails = next(self.pattern, False)
        return {key: value * (math.nan if fails else 1.)
                for key, value in losses.items()}


@pytest.mark.parametrize('pattern, code', [
    ([True, False, True], 'NF112'), ([True, False, False], 'NF113')])
def test_two_replays_that_disagree(pattern, code):
    # The iterator is state that no replay takes back.
    found = incidents_of(toy_batch(), model=Chance(pattern))
    assert [incident.cause.code for incident in found] == [code]
    assert found[0].action == 'skipped'


def test_a_verdict_that_raises_ends_no_training(monkeypatch):
    def strange(self, norm):
        raise KeyError('betas')

    monkeypatch.setattr(Symptoms, 'read', strange)
    cause = cause_of(toy_batch(rpn=math.nan))
    assert cause.code == 'NF113' and "KeyError: 'betas'" in cause.advice


class Conclusion:
    """Keeps what it is given."""

    def draw(self, told, evidence, found, context):
        self.evidence, self.found = evidence, found


def explained(findings, window=1, processes=None, max_incidents=100,
              sharded=False, steps=1, **shown):
    """What becomes of the findings about the forwards of a window.

    Args:
        findings: Gives those of a forward, by its place.
        window: Number of forwards.
        processes: The ranks of the run.
        max_incidents: As for the diagnosis.
        sharded: Whether parameters are shards.
        steps: That fail alike, one after the other.
        **shown: The evidence.

    Returns:
        The explanation of the last, what it was concluded from, and the
        forwards that were looked into.
    """
    model, conclusion, seen = ToyDetector(), Conclusion(), []
    parts = dataclasses.replace(parts_of(model, ranks=processes),
                                sharded=sharded)

    def investigate(forward, context, good, raised):
        seen.append(forward.position)
        conclusion.alone = context.alone
        return findings(forward.position)

    micros = [MicroStep(torch.tensor(1.), {}, None, CapturedForward(
        BatchSnapshot({}), Rng(), False, position))
        for position in range(window)]
    made = Diagnostician(parts, ModelParts(model), investigate, conclusion,
                         max_incidents)
    for _ in range(steps):
        told = made.explain(Evidence(micros, micros[-1], **shown), False)
    return told, conclusion, seen


def nothing(position):
    return Findings(replay=f'{position} did not fail')


@pytest.mark.parametrize('window, seen', [
    (1, [0]), (3, [2, 1, 0]), (20, list(range(19, 11, -1)))])
def test_of_gradients_the_last_forward_is_looked_into_first(window, seen):
    told, _, looked = explained(nothing, window)
    assert looked == seen and not told.failed_here
    assert told.replay == f'{seen[0]} did not fail'
    told, _, looked = explained(lambda position: Findings(
        failed=Failure.GRADS) if position == 1 else nothing(position), 3)
    assert looked == [2, 1] and told.failed_here


def test_a_bad_loss_is_that_of_its_own_forward():
    _, _, looked = explained(nothing, 3, flagged=True)
    assert looked == [2]


@pytest.mark.parametrize('settings, said', [
    (dict(sharded=True), 'parameters are shards'),
    (dict(max_incidents=0), 'there were too many before'),
    (dict(max_incidents=2, steps=3), 'there were too many before')])
def test_what_is_not_replayed(settings, said):
    told, concluded, looked = explained(nothing, **settings)
    assert told.replay == said and not told.failed_here
    assert len(looked) == settings.get('max_incidents', 0)
    assert concluded.found.status is ReplayStatus.NOT_MADE


def test_without_a_limit_each_is_replayed():
    told, _, looked = explained(nothing, max_incidents=None, steps=5)
    assert len(looked) == 5


@pytest.mark.parametrize('failed, began, elsewhere', [
    (None, [], True), (Failure.GRADS, [], False),
    # It fails here as well, but what is bad came from there.
    (Failure.LOSS, [1], True), (Failure.LOSS, [0, 1], False)])
def test_what_began_on_another_rank(failed, began, elsewhere):
    told, concluded, _ = explained(
        lambda position: Findings(failed=failed),
        processes=FakeRanks(lambda flag: [0] * flag + [1]), ranks=began,
        flagged=bool(began))
    assert (concluded.found.status is ReplayStatus.ELSEWHERE) is elsewhere
    assert told.failed_here is not elsewhere
    assert concluded.evidence.ranks == (
        began or [0] * bool(failed) + [1])


@pytest.mark.parametrize('processes', [None, FakeRanks(lambda flag: [])])
def test_without_a_context_others_are_still_there(processes, monkeypatch):
    """Who thinks that it is alone tries what leaves them waiting."""

    def strange(*args):
        raise KeyError('eps')

    monkeypatch.setattr(RunContext, 'of', strange)
    _, concluded, looked = explained(nothing, processes=processes)
    assert looked == [0] and concluded.alone is (processes is None)
