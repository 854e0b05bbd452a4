from __future__ import annotations

import math

import pytest
import torch
from helpers.guards import parts_of
from helpers.toy import toy_batch
from torch import nn

from mmdet_nanfix.diagnosis import diagnostician
from mmdet_nanfix.guard.capture import ForwardCapture
from mmdet_nanfix.guard.state.transaction import Transaction


def capture_of(model, **settings):
    transaction = Transaction(model)
    transaction.begin()
    return ForwardCapture(transaction, **settings)


def catching(model, **settings):
    """Asks the diagnosis of what is raised."""
    parts = parts_of(model)
    parts.transaction.begin()
    return ForwardCapture(parts.transaction,
                          catch=diagnostician(parts).catch, **settings)


def test_a_step_is_kept_as_the_preprocessor_gets_it(toy):
    batch = toy_batch()
    seen = capture_of(toy, whole_steps=True)
    with seen.over(toy):
        losses = toy(**toy.data_preprocessor(batch, True))
    assert seen.forward.whole_step and seen.forward.batch.value is batch
    assert seen.losses is losses and seen.caught is None


def test_without_a_step_the_arguments_are_kept(toy):
    batch = toy_batch()
    seen = capture_of(toy)
    with seen.over(toy):
        toy(batch['inputs'], mode='loss')
    assert not seen.forward.whole_step
    kept = seen.forward.batch.value
    assert kept[0] is batch['inputs'] and kept['mode'] == 'loss'


def test_nothing_stays_on_the_model(toy):
    seen = catching(toy, whole_steps=True)
    with pytest.raises(KeyError), seen.over(toy):
        toy({})
    for module in toy.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert 'forward' not in toy.__dict__


class Picky(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x):
        if not torch.isfinite(self.linear(x)).all():
            raise ValueError('not finite')
        return {'loss': x.sum()}


@pytest.mark.parametrize('catches', [True, False])
def test_an_exception_of_non_finite_numbers(catches):
    model = Picky()
    seen = catching(model) if catches else capture_of(model)
    bad = torch.full((1, 1), math.nan)
    if not catches:
        with pytest.raises(ValueError), seen.over(model):
            model(bad)
        return
    with seen.over(model):
        out = model(bad)
    assert math.isnan(out['loss'])
    assert seen.caught.text == 'ValueError: not finite'
    assert seen.caught.kind == 'ValueError'
    assert seen.forward.batch.value[0] is bad


def test_a_step_that_prepares_two_batches_is_not_kept(toy):
    seen = capture_of(toy, whole_steps=True)
    with seen.over(toy):
        for _ in range(2):
            batch = toy.data_preprocessor(toy_batch(), True)
        toy(**batch)
    assert seen.forward is None


def test_a_batch_of_anything_costs_no_training(toy):
    class Odd:

        @property
        def __dict__(self):
            raise RuntimeError

    seen = capture_of(toy)
    with seen.over(toy):
        toy(toy_batch()['inputs'], Odd())
    assert seen.forward is None


def test_begin_and_end_stand_for_the_region(toy):
    """For hosts that call forward and backward in two hooks."""
    seen = capture_of(toy)
    seen.begin(toy)
    losses = toy(toy_batch()['inputs'])
    seen.end()
    assert seen.losses is losses
    assert not toy._forward_hooks and not toy._forward_pre_hooks
