from __future__ import annotations

import math

import pytest
import torch
from helpers.toy import ToyDetector, toy_batch
from helpers.training import train, wrap
from mmengine.logging import MessageHub


def incidents_of(*batches, model=None, after=None, **settings):
    torch.manual_seed(0)
    MessageHub._instance_dict.clear()
    model = model or ToyDetector()
    wrapper = wrap(model, **settings)
    wrapper.initialize_count_status(model, 0, 99)
    found = []
    wrapper._reporter.report = found.append
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
    def strange(self, model):
        raise KeyError('betas')

    monkeypatch.setattr('mmdet_nanfix.guard.history.History.readings', strange)
    cause = cause_of(toy_batch(rpn=math.nan))
    assert cause.code == 'NF113' and "KeyError: 'betas'" in cause.advice
