from __future__ import annotations

import pytest
import torch
from helpers.guards import FakeRanks, parts_of
from helpers.toy import toy_batch
from mmengine.logging import MessageHub

from mmdet_nanfix.guard import (
    CapturedForward,
    Explanation,
    MicroStep,
    PlainTrainer,
    Remedy,
    RetryResult,
)
from mmdet_nanfix.guard.retry import Retry
from mmdet_nanfix.guard.state import BatchSnapshot, Rng
from mmdet_nanfix.incidents import Where


class Retrying(PlainTrainer):
    """Takes the batches of a window, and gives results in their order."""

    can_retry = True

    def __init__(self, model, results, ranks=None):
        super().__init__(model, ranks)
        self.results, self.tried, self.drawn = list(results), [], []

    def retry(self, batches, length, remedy, carry):
        self.tried.append(remedy)
        for batch in batches:
            self.drawn.append((float(torch.rand(())), batch))
            self._model.backbone[1].running_mean += 1
        for parameter in self._model.parameters():
            parameter.grad = torch.ones_like(parameter)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return RetryResult({'loss': 1.}, result)


@pytest.fixture
def made(toy):
    """A window of micro-steps, and a retry whose trainer is scripted."""
    MessageHub._instance_dict.clear()

    def make(*results, norms=(1., ), micro=1, ranks=None):
        trainer = Retrying(toy, results, ranks)
        parts = parts_of(toy, trainer)
        for norm in norms:
            parts.history.accept(norm)
        window = [MicroStep(torch.zeros(()), {}, None, CapturedForward(
            BatchSnapshot(toy_batch(rpn=float(index))), Rng(), True))
            for index in range(micro)]
        return trainer, window, Retry(
            toy, parts.transaction, parts.anchor, trainer, parts.scale,
            parts.history)

    return make


def found(remedy):
    return Explanation(Where(), {}, remedy=remedy, failed_here=True)


def carry(loss):
    return loss


LOWER = Remedy('retried', 64.)


def test_a_remedy_that_helps_is_kept(made, toy):
    trainer, window, retry = made(2.)
    assert retry.is_possible(window)
    rescue = retry.attempt(window, found(LOWER), carry)
    assert rescue.remedy == LOWER and rescue.norm == 2.
    assert rescue.logged == {'loss': 1.}
    # What the forwards changed, and the gradients, wait for the step.
    assert toy.backbone[1].running_mean.tolist() == [1.] * 4
    assert all(parameter.grad is not None for parameter in toy.parameters())


def test_without_a_remedy_nothing_is_tried(made):
    trainer, window, retry = made()
    assert retry.attempt(window, found(None), carry) is None
    assert trainer.tried == []


@pytest.mark.parametrize('result', [
    None, 10.1, RuntimeError('out of memory'), ValueError('a bug')])
def test_what_does_not_help_leaves_nothing_behind(made, toy, result):
    """No gradient that is absurd, and no exception, ends in a step."""
    trainer, window, retry = made(result)
    before = torch.get_rng_state()
    assert retry.attempt(window, found(LOWER), carry) is None
    assert trainer.tried == [LOWER]
    assert retry.why_not == 'retry: made again at loss scale 64, ' + {
        None: 'gradients were not finite',
        10.1: 'its gradient norm was 10.1, absurd'}.get(
            result if isinstance(result, float) else None,
            '') if not isinstance(result, Exception) else (
                'retry: made again at loss scale 64, it raised '
                f'{type(result).__name__}: {result}')
    assert toy.backbone[1].running_mean.tolist() == [0.] * 4
    assert all(parameter.grad is None for parameter in toy.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gradient_without_any_before_it_is_not_stepped_on(made):
    trainer, window, retry = made(1., norms=())
    assert retry.attempt(window, found(LOWER), carry) is None


def test_a_window_is_tried_lower_once_more(made):
    """One of its forwards was measured, and not their sum."""
    trainer, window, retry = made(None, 1., micro=3)
    rescue = retry.attempt(window, found(LOWER), carry)
    assert [remedy.scale for remedy in trainer.tried] == [64., 32.]
    assert rescue.remedy.scale == 32.
    # The same batches and random numbers both times, in their order.
    draws, batches = zip(*trainer.drawn)
    assert draws[:3] == draws[3:]
    assert [batch['inputs']['rpn'] for batch in batches] == [0., 1., 2.] * 2


def test_a_batch_that_was_written_to_cannot_be_made_again(made):
    trainer, window, retry = made(1.)
    window[0].forward.batch.value['inputs']['x'].add_(1)
    assert not retry.is_possible(window)


@pytest.mark.parametrize('failing, tried', [([1], []), ([], [.25])])
def test_all_ranks_have_to_agree(made, failing, tried):
    """A rank that has no remedy for its own failure stops all."""
    asked = []

    def which(flag):
        asked.append(flag)
        # Rank 0 is this one; of the others the answers are given.
        return [0] * flag + (failing if len(asked) == 2 else [])

    trainer, window, retry = made(1., ranks=FakeRanks(which))
    retry.attempt(window, found(Remedy('retried', .25)), carry)
    assert [remedy.scale for remedy in trainer.tried] == tried
