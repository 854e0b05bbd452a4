from __future__ import annotations

import math

import pytest
import torch
from helpers.guards import guard_of, run
from helpers.toy import toy_batch

from mmdet_nanfix.guard import CapturedForward, PlainTrainer, Remedy, RunConfig
from mmdet_nanfix.guard.standalone import NoDiagnosis
from mmdet_nanfix.guard.state import BatchSnapshot, Rng


def test_a_trainer_that_says_nothing_is_plain(toy):
    trainer = PlainTrainer(toy)
    assert trainer.ranks.alone and not trainer.can_retry
    assert trainer.position() == 0 and not trainer.half
    assert trainer.clock() == (None, 1)
    assert trainer.half_op() == (None, 0)
    with trainer.forward_region(), trainer.backward_region():
        pass
    assert trainer.config == RunConfig(False, False, None, None)
    # Each has its own.
    assert PlainTrainer(toy).config is not trainer.config


def test_a_replay_calls_the_model_and_hands_over_the_sum(toy):
    batch, losses = toy_batch(), []
    forward = CapturedForward(BatchSnapshot(batch), Rng(), False)
    PlainTrainer(toy).replay(forward, batch, losses.append)
    (loss, ) = losses
    assert torch.equal(loss, toy.parse_losses(toy(**batch))[0])


def test_one_process_agrees_with_itself(toy):
    ranks = PlainTrainer(toy).ranks
    assert ranks.which(True) == [0] and ranks.which(False) == []
    assert ranks.share('x', 0) == 'x'
    ranks.barrier()


def test_nothing_is_made_again(toy):
    result = PlainTrainer(toy).retry([], 0, Remedy('retried'), lambda x: x)
    assert result.norm is None and result.logged is None


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def test_good_bad_bad_good_and_the_limit(toy):
    guard = guard_of(toy, diagnose=NoDiagnosis, max_consecutive=2)
    assert run(guard, toy_batch()).incident is None
    before = buffers(toy)
    loss = run(guard, toy_batch(box=math.nan)).incident
    # Skipped, and BatchNorm is as it was; the scale is not to blame.
    assert loss.action == 'skipped' and loss.cause is None
    assert all(torch.equal(before[name], value)
               for name, value in toy.named_buffers())
    assert loss.where.phase == 'loss' and loss.loss_scale.after == 256
    assert loss.replay == 'nothing was replayed'
    assert loss.heads['?'].bad_losses == ['loss_second']
    assert run(guard, toy_batch()).incident is None
    overflow = run(guard, toy_batch(box=1e37)).incident
    assert overflow.where.phase == 'backward'
    assert overflow.loss_scale.after == 128
    assert overflow.heads['roi_head'].bad_grads
    assert overflow.heads['rpn_head'].fine
    verdict = run(guard, toy_batch(box=1e37))
    assert verdict.incident.action == 'aborted'
    assert '2 optimizer steps in a row' in verdict.stop
    assert (guard.stop.total, guard.stop.steps) == (3, 5)


def test_an_exception_is_raised(toy):
    guard = guard_of(toy, diagnose=NoDiagnosis)
    with pytest.raises(KeyError), guard.capture():
        toy({})
    assert 'forward' not in toy.__dict__
