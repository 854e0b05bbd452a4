"""The scaler of older versions, beside torch's own where there is one."""
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmdet_nanfix.torch_support.features import HAS_CPU_SCALER
from mmdet_nanfix.torch_support.grad_scaler import CpuGradScaler, scaler_for

SETTINGS = dict(init_scale=64., growth_factor=3., backoff_factor=.25,
                growth_interval=2)


def trained(scaler, factors, unscale=False, manual=()):
    """Scale, weight and state after each step of a fit of one number."""
    weight = nn.Parameter(torch.tensor([1., 2.]))
    optimizer = torch.optim.SGD([weight], .1)
    for index, factor in enumerate(factors):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(*([32.] if index in manual else []))
        yield (scaler.get_scale(), weight.detach().tolist(),
               weight.grad.tolist(), scaler.state_dict())


def test_backoff_and_growth():
    steps = list(trained(CpuGradScaler(**SETTINGS),
                         [1., math.inf, 1., math.nan, 1., 1., 1.]))
    assert [scale for scale, *_ in steps] == [64, 16, 16, 4, 4, 12, 12]
    # A bad step leaves the weight where it was.
    values = [weight[0] for _, weight, *_ in steps]
    assert values[1] == values[0] != values[2] == values[3]
    assert steps[2][2] == [1., 1.]


numbers = st.sampled_from([1., -.5, 0., 1e30, 3e38, math.inf, math.nan])


@pytest.mark.skipif(not HAS_CPU_SCALER, reason='torch has none before 2.3')
@settings(deadline=None, max_examples=60)
@given(factors=st.lists(numbers, max_size=12), unscale=st.booleans(),
       manual=st.sets(st.integers(0, 11)))
def test_it_is_torchs(factors, unscale, manual):
    ours, theirs = (trained(scaler, factors, unscale, manual) for scaler in (
        CpuGradScaler(**SETTINGS), torch.amp.GradScaler('cpu', **SETTINGS)))
    # A NaN is not equal to itself.
    assert repr(list(ours)) == repr(list(theirs))


def test_the_scale_stays_finite():
    scaler = CpuGradScaler(init_scale=2.**127, growth_interval=1)
    list(trained(scaler, [0.]))
    assert scaler.get_scale() == 2.**127


def test_sparse_gradients():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), .1)
    scaler = CpuGradScaler(**SETTINGS)
    scaler.scale(table(torch.tensor([1])).sum()).backward()
    scaler.unscale_(optimizer)
    assert table.weight.grad.to_dense().tolist()[1] == [1., 1.]
    table.weight.grad._values().fill_(math.nan)
    assert set(map(float, scaler._check_inf_per_device(
        optimizer).values())) == {1.}


def test_lists_of_losses_and_a_scaler_that_is_off():
    scaler = CpuGradScaler(**SETTINGS)
    one = torch.ones(())
    assert scaler.scale([one, (one, )]) == [64, (64, )]
    with pytest.raises(ValueError, match='float'):
        scaler.scale(1.)
    off = CpuGradScaler(enabled=False)
    assert off.scale(one) is one and off.get_scale() == 1
    assert off.state_dict() == {} and not off.is_enabled()
    assert [scale for scale, *_ in trained(off, [math.inf])] == [1]


def test_the_order_of_calls():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], .1)
    scaler = CpuGradScaler(**SETTINGS)
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match='scale'):
            call(optimizer)
    scaler = CpuGradScaler(**SETTINGS)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match='looked at'):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match='unscale_'):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match='step'):
        scaler.step(optimizer)
    half = nn.Parameter(torch.ones(1).half())
    half.grad = torch.ones(1).half()
    with pytest.raises(ValueError, match='FP16'):
        scaler.unscale_(torch.optim.SGD([half], .1))


def test_state_and_settings():
    scaler = CpuGradScaler(**SETTINGS)
    list(trained(scaler, [1.]))
    other = CpuGradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() == {
        'scale': 64., 'growth_factor': 3., 'backoff_factor': .25,
        'growth_interval': 2, '_growth_tracker': 1}
    with pytest.raises(RuntimeError, match='empty'):
        other.load_state_dict({})
    for name, value in (('growth_factor', 4.), ('backoff_factor', .125),
                        ('growth_interval', 7)):
        getattr(other, f'set_{name}')(value)
        assert getattr(other, f'get_{name}')() == value


def test_scalers():
    assert scaler_for('cpu', False, 8.).get_scale() == 8
    if HAS_CPU_SCALER:
        sharded = scaler_for('cpu', True, 8.)
        assert type(sharded).__name__ == 'ShardedGradScaler'
    else:
        with pytest.raises(RuntimeError, match='needs torch 2.3'):
            scaler_for('cpu', True, 8.)
