"""Make a failed step again, with what has helped in a replay.

Never with gradients that are absurd: at a low enough loss scale, or in fp32,
those of any batch are finite, and a corrupt one would be applied.
"""
from __future__ import annotations

import dataclasses
from typing import Any, Iterator, NamedTuple, Sequence

from torch import nn

from .checks.anchor import Anchor
from .history import History
from .protocols import (
    Carry,
    Explanation,
    MicroStep,
    Remedy,
    RetryResult,
    Trainer,
)
from .rules.boundary import ErrorBoundary, in_words
from .rules.loss_scale import LossScale
from .state.batch import cuda_devices, has_room
from .state.transaction import Transaction

__all__ = ['Rescue', 'Retry']


class Rescue(NamedTuple):
    """A step that was made again: with what, and what to log of it."""

    remedy: Remedy
    logged: Any
    norm: float


class Retry:
    """Makes failed steps again.

    Args:
        model: The bare model.
        transaction: Of its steps; closed when something is made again.
        anchor: Carries the state of the losses.
        trainer: Runs forwards and backwards.
        scale: The loss scale.
        history: Of the accepted steps.

    Attributes:
        why_not: Why the last attempt was of no use, in words, or None.
    """

    def __init__(self, model: nn.Module, transaction: Transaction,
                 anchor: Anchor, trainer: Trainer, scale: LossScale,
                 history: History) -> None:
        self._model = model
        self._transaction = transaction
        self._anchor = anchor
        self._trainer = trainer
        self._ranks = trainer.ranks
        self._scale = scale
        self._history = history
        self.why_not: str | None = None

    def is_possible(self, window: Sequence[MicroStep]) -> bool:
        """Tell if a window can be made again, in all processes."""
        possible = False
        with ErrorBoundary():
            possible = self._trainer.can_retry and all(
                micro.forward is not None and micro.forward.whole_step
                and micro.forward.batch.is_restorable for micro in window)
        return not self._ranks.which(not possible)

    def attempt(self, window: Sequence[MicroStep], found: Explanation,
                carry: Carry) -> Rescue | None:
        """Make a window again, where a remedy is known to all.

        Args:
            window: The micro-steps; their changes are undone.
            found: What is known of its failure.
            carry: Gives what to call ``backward`` on for a loss.

        Returns:
            None where that was of no use, and nothing has changed. Else
            gradients to step on are there, unscaled, and what the forwards
            changed waits to be accepted.
        """
        self.why_not = None
        remedy = self._agreed(found)
        if remedy is None:
            return None
        room = has_room(cuda_devices(self._model), 2. if remedy.fp32 else 1.)
        if self._ranks.which(not room):
            self.why_not = 'retry: not made, there is not enough memory'
            return None
        rng = self._transaction.rng_now()
        for tried in self._attempts(remedy, len(window)):
            result = self._make(window, tried, carry)
            self._anchor.flag = None
            norm = result.norm
            fine = norm is not None and self._history.sane(norm) is True
            if not self._ranks.which(not fine):
                return Rescue(tried, result.logged, norm or 0.)
            self.why_not = self._words(tried, result, fine)
            self._transaction.rollback()
            # As after a skipped step, wherever it has failed.
            rng.restore()
            for parameter in self._model.parameters():
                parameter.grad = None
        return None

    def _words(self, remedy: Remedy, result: RetryResult, fine: bool) -> str:
        """Why a step that was made again was of no use."""
        words = 'it raised ' + result.error if result.error else (
            'gradients were not finite' if result.norm is None else
            f'its gradient norm was {result.norm:.3g}, absurd'
            if not fine else 'it failed on another rank')
        scale = remedy.scale or self._scale.scale
        return f'retry: made again at loss scale {scale:g}' + (
            f' with {", ".join(remedy.fp32)} in fp32' if remedy.fp32 else ''
        ) + f', {words}'

    def _agreed(self, found: Explanation) -> Remedy | None:
        """The remedy of all ranks, or None.

        Those where it began must know one, of the same parts in fp32; the
        lowest scale fits all.
        """
        ranks, own = self._ranks, found.remedy
        if ranks.alone:
            return own
        failed = found.failed_here
        where = ranks.which(failed)
        if not where or ranks.which(failed and own is None):
            return None
        action, fp32 = ranks.share(
            (own.action, own.fp32) if own else None, where[0])
        if ranks.which(failed and own is not None
                       and own.fp32 != tuple(fp32)):
            return None
        wanted = own.scale if failed and own else None
        scale = before = self._scale.scale
        while ranks.which(wanted is not None and scale > wanted):
            scale *= self._scale.settings.backoff_factor
        return Remedy(action, scale if scale < before else None, tuple(fp32))

    def _attempts(self, remedy: Remedy, length: int) -> Iterator[Remedy]:
        """A remedy; for a window, of which one forward was measured, lower.

        Args:
            remedy: The remedy.
            length: Of the window.
        """
        yield remedy
        rules = self._scale.settings
        lower = (remedy.scale or 0.) * rules.backoff_factor
        if length > 1 and lower >= rules.min_scale:
            yield dataclasses.replace(remedy, scale=lower)

    def _make(self, window: Sequence[MicroStep], remedy: Remedy,
              carry: Carry) -> RetryResult:
        """From the same batches, weights, buffers and random numbers."""
        try:
            return self._trainer.retry(self._prepared(window), len(window),
                                       remedy, carry)
        except Exception as error:
            # No step is worth a training, least of all the memory.
            return RetryResult(error=in_words(error))

    def _prepared(self, window: Sequence[MicroStep]) -> Iterator[Any]:
        """Batches of a window, each forward prepared when it is taken."""
        for index, micro in enumerate(window):
            forward: Any = micro.forward
            if index:
                self._transaction.settle()
            forward.rng.restore()
            self._transaction.begin()
            yield forward.batch.restore()
