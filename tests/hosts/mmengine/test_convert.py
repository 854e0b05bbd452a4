from __future__ import annotations

import pytest
import torch
from helpers.toy import toy_batch
from helpers.training import train, wrap
from mmengine.optim import OptimWrapper, OptimWrapperDict, StepParamScheduler
from stock import stock_on_cpu

from mmdet_nanfix.hosts.mmengine.amp_optim_wrapper import (
    UnguardedAmpOptimWrapper,
)
from mmdet_nanfix.hosts.mmengine.convert import guard_existing_wrapper


def test_several_optimizers_are_refused_in_one_line(toy):
    one = OptimWrapper(torch.optim.SGD(toy.parameters(), .1))

    class Own(OptimWrapper):
        pass

    for wrapper, named in (
            (OptimWrapperDict(a=one), 'several optimizers'),
            (Own(torch.optim.SGD(toy.parameters(), .1)), 'Own')):
        with pytest.raises(TypeError, match=named) as caught:
            guard_existing_wrapper(wrapper, {})
        assert '\n' not in str(caught.value)


@pytest.mark.parametrize('kind, settings, scale, named', [
    ('OptimWrapper', {}, 1., 'NanSafeOptimWrapper'),
    ('NanSafeAmpOptimWrapper', dict(init_scale=32.), 32.,
     'NanSafeAmpOptimWrapper'),
    ('NanSafeAmpOptimWrapper', {}, 256., 'NanSafeAmpOptimWrapper')])
def test_a_wrapper_is_converted_where_it_stands(toy, kind, settings, scale,
                                                named):
    wrapper = wrap(toy, kind)
    guard_existing_wrapper(wrapper, settings)
    assert type(wrapper).__name__ == named
    train(toy, wrapper, toy_batch(box=float('nan')), toy_batch())
    assert wrapper.stop_rule.total == 1 and wrapper.stop_rule.steps == 2
    assert wrapper.scale_rules.scale == scale


def test_stock_amp_keeps_its_scale(toy):
    with stock_on_cpu():
        wrapper = wrap(toy, 'AmpOptimWrapper', loss_scale=dict(
            init_scale=32., growth_interval=7))
        guard_existing_wrapper(wrapper, {})
    assert type(wrapper).__name__ == 'NanSafeAmpOptimWrapper'
    assert wrapper.scale_rules.scale == 32.
    assert wrapper.scale_rules.settings.growth_interval == 7


def test_a_scheduler_that_has_bound_the_step_counts_on(toy):
    wrapper = wrap(toy, 'OptimWrapper')
    scheduler = StepParamScheduler(wrapper, 'lr', step_size=1)
    guard_existing_wrapper(wrapper, {})
    before = wrapper._global_step
    train(toy, wrapper, toy_batch(), toy_batch(box=float('nan')))
    assert wrapper._global_step == before + 2 and wrapper.skipped
    scheduler.step()


@pytest.mark.parametrize('kind', ['OptimWrapper', 'NanSafeAmpOptimWrapper'])
def test_what_is_not_guarded_stays_as_it_is(said, kind):
    """NPU, MPS, XPU; torch's own device without memory stands for them."""
    model = torch.nn.Linear(1, 1, device='meta')
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), .1))
    if kind != 'OptimWrapper':
        # MMEngine's own class takes none of them on this machine.
        wrapper.__class__ = UnguardedAmpOptimWrapper
    before = dict(vars(wrapper))
    guard_existing_wrapper(wrapper, dict(max_consecutive=3))
    assert type(wrapper).__name__ in ('OptimWrapper',
                                      'UnguardedAmpOptimWrapper')
    assert vars(wrapper) == before
    assert len(said()) == (kind == 'OptimWrapper')
