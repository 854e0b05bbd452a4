"""Guard one optimizer step as a transaction: detect, undo, decide, redo.

A host feeds it the losses of each forward and the loss of each backward, and
asks it to judge each optimizer step. It knows tensors, not runners.
"""
from __future__ import annotations

import contextlib
import dataclasses
import operator
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..incidents import Counts, Incident, LossScaleChange
from .capture import ForwardCapture
from .checks.anchor import Anchor, loss_terms
from .checks.finite import bad_tensors
from .history import History
from .protocols import (
    CaughtException,
    Diagnosis,
    Evidence,
    Explanation,
    MicroStep,
    Trainer,
)
from .retry import Rescue, Retry
from .rules.boundary import ErrorBoundary
from .rules.loss_scale import LossScale
from .rules.promotions import Fp32Promotions
from .rules.stop_rule import StopRule
from .standalone import NoDiagnosis, PlainTrainer, StepParts
from .state.buffers import WatchedBuffers
from .state.transaction import Transaction
from .state.tree import StateTree

__all__ = ['GuardedStep', 'Verdict']

# Causes that are in a batch, not in the loss scale.
_ITS_OWN = ('NF104', 'NF105', 'NF106', 'NF108')


@dataclasses.dataclass
class Verdict:
    """What became of one optimizer step.

    Attributes:
        incident: The record of a failed step, or None.
        stop: Why training should stop, in words, or None.
        note: What the user should know beside it, or None.
        rescued: Whether the step was made again, with gradients that are
            fine: they are there, unscaled.
        logged: What the model's training step returned then, for the log.
    """

    incident: Incident | None = None
    stop: str | None = None
    note: str | None = None
    rescued: bool = False
    logged: Any = None


class GuardedStep:
    """Evidence, decision and rollback of one optimizer's steps.

    Args:
        model: The bare model, without a distributed wrapper.
        optimizer: Its optimizer; only its parameters can carry the anchor.
        scale: Loss-scale rules.
        stop: Stop rule.
        trainer: The training loop; None for a model that is trained by hand.
        diagnose: Makes what explains failed steps.
        sharded: Parameters are shards that cannot carry an anchor: the flag
            is left in :attr:`flag` for the host to fold in.
        promotions: Modules that stay in fp32.

    Attributes:
        buffers: Those that are watched, and those that are not.
        history: Of the accepted steps.
        diagnosis: Explains failed steps.
        sharded: Whether parameters are shards.
        parts: What the step is made of, as the diagnosis sees it.
    """

    def __init__(self,
                 model: nn.Module,
                 optimizer: torch.optim.Optimizer,
                 scale: LossScale,
                 stop: StopRule,
                 trainer: Trainer | None = None,
                 diagnose: Callable[[StepParts], Diagnosis] = NoDiagnosis,
                 sharded: bool = False,
                 promotions: Fp32Promotions | None = None) -> None:
        self.model = model
        self.scale = scale
        self.stop = stop
        self.sharded = sharded
        self.buffers = WatchedBuffers(model)
        self.history = History(optimizer)
        self._trainer = trainer or PlainTrainer(model)
        self._ranks = self._trainer.ranks
        self._optimizer = optimizer
        self._known: tuple[list[Tensor], set[int]] = ([], set())
        self._anchor = Anchor(self._optimized, sharded)
        self._transaction = Transaction(
            model, [self._trainer.remember], StateTree(model).snapshot)
        self._window: list[MicroStep] = []
        self._capture = ForwardCapture(self._transaction)
        self._flags: list[Tensor] = []
        self._copies = False
        self._promotions = promotions or Fp32Promotions()
        self._retry = Retry(model, self._transaction, self._anchor,
                            self._trainer, scale, self.history)
        self.parts = StepParts(
            model, optimizer, self._trainer, scale, self._transaction,
            self.buffers, self._anchor, self.history, sharded)
        self.diagnosis = diagnose(self.parts)

    def _optimized(self) -> set[int]:
        """``id`` of each parameter that the optimizer has now."""
        now = [parameter for group in self._optimizer.param_groups
               for parameter in group['params']]
        known = self._known[0]
        if len(now) != len(known) or not all(map(operator.is_, now, known)):
            self._known = now, set(map(id, now))
        return self._known[1]

    @property
    def flag(self) -> Tensor | None:
        """0 or NaN for the window so far, where no parameter carries it."""
        return self._anchor.flag

    @property
    def must_skip(self) -> bool:
        """Whether the window lacks gradients, so that none can be checked."""
        return any(micro.caught is not None for micro in self._window)

    @property
    def window_open(self) -> bool:
        """Whether a window has begun and is not decided yet."""
        return bool(self._window)

    def flag_step(self, flag: Tensor) -> None:
        """Make the step of the coming backward fail where a flag is NaN.

        For inputs that were sanitized so that all ranks could go on.

        Args:
            flag: Scalar, 0 or NaN.
        """
        self._flags.append(flag)

    @contextlib.contextmanager
    def capture(self, module: nn.Module | None = None) -> Iterator[None]:
        """Take in the losses that the model returns within this region.

        The region is the forward of one micro-step; the first of a window
        begins the transaction. In a single process a forward that raises
        because of non-finite numbers or of a bad annotation returns a NaN
        loss instead.

        Args:
            module: What is called, if not the model itself.
        """
        self._transaction.begin()
        self._flags = []
        self._capture = ForwardCapture(
            self._transaction, self._copies, self._trainer.whole_steps,
            self.diagnosis.catch if self._ranks.alone else None)
        with self._capture.over(module or self.model):
            yield

    def attach(self, loss: Tensor) -> Tensor | None:
        """Return what to call ``backward`` on; no device sync.

        Args:
            loss: Scalar, unscaled.

        Returns:
            None where there is nothing to go back through: the forward
            raised, and the step will be skipped.
        """
        if self._window:
            self.diagnosis.note_terms(self._window[-1].terms)
            self._window[-1] = self._window[-1].detached()
        seen, self._capture = self._capture, ForwardCapture(self._transaction)
        terms = {} if seen.caught else loss_terms(seen.losses)
        self._window.append(MicroStep(loss, terms, seen.caught, seen.forward))
        if seen.forward is not None:
            seen.forward.position = self._trainer.position()
            # Once a model has written to a batch, batches are copied.
            self._copies = self._copies or seen.forward.batch.written_to
        if seen.caught is not None:
            return None
        return self._carry(loss, self._flags)

    def _carry(self, loss: Tensor, flags: Sequence[Tensor] = ()) -> Tensor:
        """The loss, with its state and that of the buffers in a gradient."""
        return self._anchor.carry(loss, [
            self.buffers.flag(self._transaction.buffers(), loss.device),
            *flags], must_attach=not self._ranks.alone)

    def settle(self) -> None:
        """Note what the last forward changed: its window goes on.

        Hooks run before the next forward, and what they do stays.
        """
        self._transaction.settle()

    def loss_is_bad(self) -> bool:
        """Tell if the last loss is not finite; one read from the device.

        For hosts that must know before the backward.
        """
        return bool(bad_tensors([self._window[-1].loss]))

    def give_up(self) -> None:
        """Skip the window without the backward of its last micro-step."""
        self._window[-1].caught = CaughtException()

    def judge(self, found_inf: bool, norm: Any = None) -> Verdict:
        """Decide on an optimizer step and update scale and counters.

        Args:
            found_inf: Whether the check of the gradients, anchor included,
                failed. The gradients must still be there, not yet clipped.
            norm: Unscaled norm of the gradients of a healthy step before
                clipping: a float, a scalar tensor, or None.

        Returns:
            The verdict. A healthy step costs no device sync. A failed one
            takes back what the forwards changed, and replays the failing
            one a few times; its gradients are gone then, unless it was
            rescued.
        """
        window, self._window = self._window, []
        self._anchor.flag = None
        if not found_inf:
            last = window[-1] if window else None
            self._accept(window, norm, last)
            self.scale.update(losses_finite=True, grads_finite=True)
            self.stop.update(skipped=False)
            return Verdict()
        before = self.scale.scale
        evidence = self.diagnosis.look(window)
        note = incident = None
        with ErrorBoundary():
            note = self.buffers.suspect(evidence.bad_buffers) if (
                evidence.where.phase == 'buffers') else None
        self._transaction.rollback()
        can_retry = not self.sharded and self._retry.is_possible(window)
        found = self.diagnosis.explain(evidence, can_retry)
        rescue = self._retry.attempt(
            window, found, self._carry) if can_retry else None
        if rescue is not None:
            self._accept(window, rescue.norm)
            note = self._promote(rescue) or note
        elif self._retry.why_not and found.cause and can_retry:
            found.cause.evidence.append(self._retry.why_not)
        self._rescale(evidence, found, rescue)
        stop = self.stop.update(skipped=rescue is None,
                                saved=rescue is not None)
        with ErrorBoundary() as boundary:
            incident = self._incident(evidence, found, rescue, before, stop)
        if boundary.error is not None:
            note = f'no record of an incident was made ({boundary.error})'
        return Verdict(incident, stop, note, rescue is not None,
                       rescue.logged if rescue else None)

    def _accept(self, window: list[MicroStep], norm: Any,
                last: MicroStep | None = None) -> None:
        self._transaction.commit()
        self.buffers.accept()
        self.diagnosis.accept(next((
            micro.forward for micro in window
            if micro.forward is not None), None))
        self.history.accept(norm, last.loss if last else None,
                            last.terms if last else None)

    def _promote(self, rescue: Rescue) -> str | None:
        """Count a rescue for its modules in fp32; one sentence, or None."""
        iteration, note = self._trainer.clock()[1], None
        for name in rescue.remedy.fp32:
            if self._promotions.record_rescue(name, iteration):
                note = (f'{name} runs in fp32 from now on: that has '
                        'saved three steps of late')
        return note

    def _rescale(self, evidence: Evidence, found: Explanation,
                 rescue: Rescue | None) -> None:
        """Set the loss scale of the next step."""
        alone = self._ranks.alone
        code = found.cause.code if found.cause and alone else None
        if rescue is not None and rescue.remedy.scale is not None:
            self.scale.fit(rescue.remedy.scale)
        elif rescue is not None:
            self.scale.update(losses_finite=True, grads_finite=True)
        elif code == 'NF101' and found.fits:
            self.scale.fit(found.fits)
        else:
            # A single batch at fault would be applied at a lower scale the
            # next time. Ranks do not know this of each other.
            its_own = code in _ITS_OWN and self.stop.consecutive == 0
            self.scale.update(losses_finite=not evidence.flagged
                              and not its_own, grads_finite=False)

    def _incident(self, evidence: Evidence, found: Explanation,
                  rescue: Rescue | None, before: float, stop: str | None
                  ) -> Incident:
        caught, ranks = evidence.caught, self._ranks
        epoch, iteration = self._trainer.clock()
        remedy = rescue.remedy if rescue else None
        return Incident(
            rank=ranks.rank, epoch=epoch, iter=iteration,
            where=found.where, heads=found.heads,
            loss_scale=LossScaleChange(before, self.scale.scale),
            action='aborted' if stop else (
                remedy.action if remedy else 'skipped'),
            counts=Counts(self.stop.consecutive, self.stop.total,
                          self.stop.steps),
            images=found.images, cause=found.cause,
            error=caught.text or None if caught else None,
            ranks=None if ranks.alone else evidence.ranks or None,
            origin=found.origin, replay=found.replay,
            remedy=remedy.to_dict() if remedy else None)
