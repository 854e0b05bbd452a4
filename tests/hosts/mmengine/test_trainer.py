from __future__ import annotations

import math

import pytest
import torch
from helpers.torch_features import needs_fused
from helpers.toy import toy_batch
from helpers.training import same, train, weights, wrap

from mmdet_nanfix.guard import Remedy
from mmdet_nanfix.hosts.mmengine.trainer import ReplayOptimWrapper


def test_a_stand_in_hands_over_the_loss_and_moves_nothing(toy):
    wrapper = wrap(toy, accumulative_counts=4)
    wrapper.initialize_count_status(toy, 0, 8)
    before, losses = weights(toy), []
    toy.train_step(toy_batch(), ReplayOptimWrapper(wrapper, losses.append, 0))
    assert same(before, weights(toy)) and wrapper.inner_count == 0
    (loss, ) = losses
    with wrapper.replay_context():
        total, _ = toy.parse_losses(toy(**toy_batch()))
    assert torch.equal(loss, total / 4)


@pytest.mark.parametrize('count, share', [(0, 1 / 3), (5, 1 / 3), (6, 1.)])
def test_the_last_window_is_short(toy, count, share):
    """Seven iterations: the seventh is a window by itself."""
    wrapper = wrap(toy, accumulative_counts=3)
    wrapper.initialize_count_status(toy, 0, 7)
    losses = []
    for inner in (count, 0):
        toy.train_step(toy_batch(), ReplayOptimWrapper(
            wrapper, losses.append, inner))
    assert torch.allclose(losses[0] / share, losses[1] * 3)


def retry(wrapper, scale):
    return wrapper.trainer.retry([toy_batch()], 1, Remedy('retried', scale),
                                 lambda loss: loss)


def test_a_retry_has_gradients_that_count(toy):
    wrapper = wrap(toy, loss_scale=64.)
    wrapper.initialize_count_status(toy, 0, 9)
    train(toy, wrapper, toy_batch())
    scaled = []
    handle = toy.rpn_head.out.bias.register_hook(
        lambda grad: scaled.append(grad.clone()))
    result = retry(wrapper, 32.)
    handle.remove()
    assert math.isfinite(float(result.logged['loss']))
    assert torch.equal(scaled[0], toy.rpn_head.out.bias.grad * 32)
    total = sum(float(p.grad.norm()**2) for p in toy.parameters())
    assert math.isclose(result.norm, math.sqrt(total), rel_tol=1e-5)


def test_a_retry_that_overflows_has_no_norm(toy):
    wrapper = wrap(toy, loss_scale=64.)
    wrapper.initialize_count_status(toy, 0, 9)
    train(toy, wrapper, toy_batch())
    assert retry(wrapper, 2.**126).norm is None


@needs_fused
def test_a_fused_optimizer_is_told_the_scale(toy):
    wrapper = wrap(toy, optimizer=dict(type='AdamW', lr=.01, fused=True),
                   loss_scale=64.)
    wrapper.initialize_count_status(toy, 0, 9)
    norms = []
    for scale in (32., 8.):
        toy.zero_grad()
        norms.append(retry(wrapper, scale).norm)
    assert math.isclose(*norms, rel_tol=1e-3)
