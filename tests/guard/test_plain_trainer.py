from __future__ import annotations

import torch
from helpers.toy import toy_batch

from mmdet_nanfix.guard import CapturedForward, PlainTrainer, Remedy, RunConfig
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
