from __future__ import annotations

import math

import pytest
import torch
from helpers.guards import Running, go, guard_of

from mmdet_nanfix.guard.state.buffers import WatchedBuffers


def test_buffers_that_hold_infinities_on_purpose():
    model = Running()
    model.mask[0, 1] = -math.inf
    guard = guard_of(model)
    assert guard.buffers.exempt == {'mask'}
    assert go(guard, x=torch.ones(3, 2)).incident is None


@pytest.mark.parametrize('fill', [
    [[0., -math.inf], [0., 0.]], [[.5, math.inf], [-math.inf, 3.]],
    [[math.inf] * 2] * 2])
def test_infinities_that_every_forward_fills_in_cost_two_steps(fill):
    guard = guard_of(Running())
    fill = torch.tensor(fill)
    verdicts = [go(guard, x=torch.ones(3, 2), fill=fill) for _ in range(4)]
    assert [verdict.incident is None for verdict in verdicts] == [
        False, False, True, True]
    assert verdicts[0].note is None and 'mask' in verdicts[1].note


def test_a_mask_that_is_made_in_a_forward_costs_two_steps():

    class Lazy(Running):

        def forward(self, x):
            if 'late' not in self._buffers:
                self.register_buffer('late', torch.tensor(
                    [0., math.inf, -math.inf, 1.]), persistent=False)
            return super().forward(x)

    guard = guard_of(Lazy())
    verdicts = [go(guard, x=torch.ones(3, 2)) for _ in range(4)]
    assert [verdict.incident is None for verdict in verdicts] == [
        False, False, True, True]


@pytest.mark.parametrize('fill', [
    [[1., math.inf], [0., 0.]], [[0., -math.inf], [0., 0.]]])
def test_a_statistic_that_overflows_now_and_then_is_never_exempt(fill):
    guard = guard_of(Running())
    for bad in (True, False, True, False, True):
        verdict = go(guard, x=torch.ones(3, 2),
                     fill=torch.tensor(fill) if bad else None)
        assert (verdict.incident is not None) is bad
        assert verdict.note is None and guard.buffers.exempt == set()


@pytest.mark.parametrize('fill', [
    [[math.nan] * 2] * 2, [[-math.inf, math.nan], [0., 0.]]])
def test_a_nan_is_never_meant(fill):
    guard = guard_of(Running())
    for _ in range(3):
        verdict = go(guard, x=torch.ones(3, 2), fill=torch.tensor(fill))
        assert verdict.incident is not None and verdict.note is None


def test_an_overflowing_batch_norm_does_not_pass_for_a_mask():

    class Normed(torch.nn.Module):

        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)

        def forward(self, x):
            self.norm(x)
            return {'loss': self.norm.weight.sum()}

    guard = guard_of(Normed())
    for sign in (1., -1., 1., 1.):
        verdict = go(guard, x=torch.tensor([[3e38], [2e38]]) * sign)
        assert verdict.incident.where.phase == 'buffers'
        assert verdict.note is None and guard.buffers.exempt == set()


def test_lazy_and_odd_buffers_are_passed_over():
    model = torch.nn.Module()
    model.lazy = torch.nn.LazyBatchNorm1d()
    # Torch 2.0 has no floats of 8 bits.
    model.register_buffer('small', torch.zeros(2).to(
        getattr(torch, 'float8_e5m2', torch.int8)))
    model.register_buffer('far', torch.zeros(2, device='meta'))
    model.register_buffer('count', torch.zeros((), dtype=torch.long))
    assert WatchedBuffers(model).bad() == []
