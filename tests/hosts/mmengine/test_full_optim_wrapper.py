from __future__ import annotations

import math

import pytest
import torch
from helpers.toy import toy_batch
from helpers.training import same, train, weights, wrap

from mmdet_nanfix import NonFiniteError


def test_good_bad_bad_good_limit(toy):
    wrapper = wrap(toy, 'NanSafeOptimWrapper', nanfix=dict(max_consecutive=3))
    skipped = []
    for box in (1., math.nan, math.inf, 1.):
        before = weights(toy)
        train(toy, wrapper, toy_batch(box=box))
        skipped.append(wrapper.skipped)
        assert same(before, weights(toy)) == wrapper.skipped
    assert skipped == [False, True, True, False]
    before = weights(toy)
    with pytest.raises(NonFiniteError, match='3 optimizer steps in a row'):
        train(toy, wrapper, *[toy_batch(box=math.inf)] * 3)
    assert same(before, weights(toy))
    assert wrapper.scale_rules.scale == 1


def test_settings_of_half_precision_are_checked_all_the_same(toy):
    wrapper = wrap(toy, 'NanSafeOptimWrapper', nanfix=dict(init_scale=64.))
    assert wrapper.scale_rules.scale == 1
    with pytest.raises(TypeError, match='init_scael'):
        wrap(toy, 'NanSafeOptimWrapper', nanfix=dict(init_scael=64.))
    with pytest.raises(ValueError, match='init_scale'):
        wrap(toy, 'NanSafeOptimWrapper', nanfix=dict(init_scale=-1.))


def test_without_parameters_to_carry_it_the_state_of_the_losses_is_a_flag(
        toy):
    """The guard leaves it beside the gradients, which are fine."""
    wrapper = wrap(toy, 'NanSafeOptimWrapper')
    train(toy, wrapper, toy_batch())
    with wrapper.optim_context(toy):
        losses = toy(**toy_batch())
    wrapper.backward(toy.parse_losses(losses)[0])
    assert not wrapper.found_inf()
    wrapper.guard.parts.anchor.flag = torch.tensor(math.nan)
    assert wrapper.found_inf()
