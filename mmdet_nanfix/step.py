"""The guarded step: decide on one optimizer step, and keep the evidence.

A host feeds it the losses of each forward and the loss of each backward, and
asks it to judge each optimizer step. It knows tensors, not runners.
"""
from __future__ import annotations

import contextlib
import dataclasses
from typing import (
    Any,
    Callable,
    Iterator,
    Sequence,
)

import torch
from torch import Tensor, nn

from .buffers import WatchedBuffers
from .finite import Anchor, bad_tensors
from .heads import loss_terms
from .host import Host
from .incidents import Cause, Counts, Incident
from .inquiry import ELSEWHERE, Evidence, Inquiry, MicroStep
from .picture import Undo
from .policy import LossScale, LossScaleSettings, StopRule
from .remedies import Remedy, choose, retry
from .search import Findings
from .sites import Site
from .sticky import StickyParts
from .transaction import Transaction, cuda_devices, has_room
from .trial import Raised
from .watch import Watch

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
        clock: Returns epoch (or None) and global iteration, both from 1.
        rank: Process of a distributed run.
        agree: Turns "it began here" into the list of ranks where it began.
            Called after a failure only. None in a single process, where
            exceptions of a forward are looked into as well.
        others: State outside of the model that a forward advances, as for
            :class:`~mmdet_nanfix.transaction.Transaction`.
        sharded: Parameters are shards that cannot carry an anchor: the flag
            is left in :attr:`flag` for the host to fold in.
        host: Runs replays.
        max_incidents: After so many failed steps no origin is looked for
            any more; None for always, 0 for never.
        sticky: Parts that stay in fp32.

    Attributes:
        flag: 0 or NaN for the window so far, where no parameter carries it.
        buffers: Those that are watched, and those that are not.
        history: Of the accepted steps.
        sharded: Whether parameters are shards.
    """

    def __init__(self,
                 model: nn.Module,
                 optimizer: torch.optim.Optimizer,
                 scale: LossScale,
                 stop: StopRule,
                 clock: Callable[[], Any],
                 rank: int = 0,
                 agree: Callable[[bool], list[int]] | None = None,
                 others: Sequence[Callable[[], Callable[[], Undo]]] = (),
                 sharded: bool = False,
                 host: Host | None = None,
                 max_incidents: int | None = 100,
                 sticky: StickyParts | None = None) -> None:
        self.model = model
        self.scale = scale
        self.stop = stop
        self.flag: Tensor | None = None
        self._clock = clock
        self._rank = rank
        self._agree = agree
        self.sharded = sharded
        self._optimizer = optimizer
        self._anchor = Anchor(self._optimized)
        self._known: tuple[Any, set[int]] = ((), set())
        self._window: list[MicroStep] = []
        self._transaction = Transaction(model, others)
        self._seen = Watch(self._transaction)
        self._poison: list[Tensor] = []
        self._host = host or Host()
        self._copies = False
        self._sticky = sticky or StickyParts()
        self.buffers = WatchedBuffers(model)
        self._inquiry = Inquiry(
            model, optimizer, self._transaction, self.buffers, self._anchor,
            scale, self._host, rank, agree, self._optimized, max_incidents)
        self.history = self._inquiry.history

    def _optimized(self) -> set[int]:
        """``id`` of each parameter that the optimizer has now."""
        groups = [group['params'] for group in self._optimizer.param_groups]
        lengths = tuple(map(len, groups))
        if self._known[0] != lengths:
            self._known = lengths, {id(parameter) for group in groups
                                    for parameter in group}
        return self._known[1]

    @property
    def must_skip(self) -> bool:
        """Whether the window lacks gradients, so that none can be checked."""
        return any(micro.raised is not None for micro in self._window)

    @property
    def window_open(self) -> bool:
        """Whether a window has begun and is not decided yet."""
        return bool(self._window)

    def taint(self, flag: Tensor) -> None:
        """Make the step of the coming backward fail where a flag is NaN.

        For what was mended on the way so that all ranks could go on.

        Args:
            flag: Scalar, 0 or NaN.
        """
        self._poison.append(flag)

    @contextlib.contextmanager
    def watch(self, module: nn.Module | None = None) -> Iterator[None]:
        """Take in the losses that the model returns within this region.

        The region is the forward of one micro-step; the first of a window
        begins the transaction. In a single process a forward that raises
        because of non-finite numbers or of a bad annotation returns a NaN
        loss instead.

        Args:
            module: What is called, if not the model itself.
        """
        self._transaction.begin()
        self._poison = []
        self._seen = Watch(self._transaction, self._copies,
                           steps=self._host.train_step is not None,
                           catches=self._agree is None)
        with self._seen.over(module or self.model):
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
            self._inquiry.note_owners(self._window[-1].terms)
            self._window[-1] = self._window[-1].detached()
        seen, self._seen = self._seen, Watch(self._transaction)
        terms = {} if seen.raised else loss_terms(seen.losses)
        self._window.append(MicroStep(loss, terms, seen.raised,
                                      seen.forward))
        if seen.forward is not None:
            seen.forward.place = self._host.place()
            # Once a model has written to a batch, batches are copied.
            self._copies = self._copies or seen.forward.batch.written_to
        if seen.raised is not None:
            return None
        return self._carry(loss, self._poison)

    def _carry(self, loss: Tensor, poison: Sequence[Tensor] = ()) -> Tensor:
        """The loss, with its state and that of the buffers in a gradient."""
        flags = [self.buffers.flag(self._transaction.buffers(), loss.device),
                 *(flag.to(loss.device) for flag in poison)]
        flag = _sum([flag for flag in flags if flag is not None])
        if not self.sharded:
            attached = self._anchor.attach(loss, flag)
            if self._anchor.parameter is not None or (
                    self._agree is not None):
                return attached
        # Nothing can carry it: a model of shards, or one whose whole
        # forward is within a reentrant checkpoint.
        value = loss.detach()
        self.flag = _sum([item for item in (
            self.flag, value - value, flag) if item is not None])
        return loss

    def settle(self) -> None:
        """Note what the last forward changed: its window goes on.

        Hooks run before the next forward, and what they do stays.
        """
        self._transaction.settle()

    def loss_is_bad(self) -> bool:
        """Whether the last loss is not finite; one read from the device.

        For hosts that must know before the backward.
        """
        return bool(bad_tensors([self._window[-1].loss]))

    def give_up(self) -> None:
        """Skip the window without the backward of its last micro-step."""
        self._window[-1].raised = Raised('', None, Site(), [])

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
        self.flag = None
        if not found_inf:
            self._accept(window)
            last = window[-1] if window else None
            self.history.accept(norm, last.loss if last else None,
                                last.terms if last else None)
            self.scale.update(losses_finite=True, grads_finite=True)
            self.stop.update(skipped=False)
            return Verdict()
        return self._failed(window)

    def _accept(self, window: list[MicroStep]) -> None:
        self._transaction.commit()
        self.buffers.accept()
        self._inquiry.good = next((micro.forward for micro in window
                                   if micro.forward is not None), None)

    def _failed(self, window: list[MicroStep]) -> Verdict:
        """Take back, look for the cause, make it again or skip, record."""
        before = self.scale.scale
        epoch, iteration = self._clock()
        evidence = self._inquiry.gather(window)
        note = self.buffers.suspect(evidence.bad_buffers) if (
            evidence.where.phase == 'buffers') else None
        self._transaction.rollback()
        can_step = self._can_step(window)
        found = self._inquiry.find(evidence, before, self.sharded, can_step)
        where = self._inquiry.where(evidence, found)
        cause = self._inquiry.cause(where, evidence, found)
        remedy = self._remedy(cause, found, can_step)
        rescued, logged = self._rescue(window, remedy)
        after = self._rescale(evidence, cause, found, rescued)
        stop = self.stop.update(skipped=rescued is None,
                                saved=rescued is not None)
        if rescued is not None:
            for part in rescued.fp32:
                if self._sticky.save(part, iteration):
                    note = (f'{part} runs in fp32 from now on: that has '
                            'saved three steps of late')
        incident = self._inquiry.incident(
            where, evidence, found, epoch=epoch, iter=iteration, cause=cause,
            loss_scale=(before, after),
            action='aborted' if stop else (
                rescued.action if rescued else 'skipped'),
            remedy=rescued.to_dict() if rescued else None,
            counts=Counts(self.stop.consecutive, self.stop.total,
                          self.stop.steps))
        return Verdict(incident, stop, note, rescued is not None, logged)

    def _can_step(self, window: list[MicroStep]) -> bool:
        """Whether the window can be made again; all ranks agree."""
        here = self._host.retries is not None and not self.sharded and all(
            micro.forward is not None and micro.forward.whole_step
            and micro.forward.batch.can_be_had for micro in window)
        return not self._agree(not here) if self._agree else here

    def _remedy(self, cause: Cause | None, found: Findings,
                can_step: bool) -> Remedy | None:
        """What the step is made again with, or None to skip it."""
        remedy = choose(cause, found, self.history.sane) if can_step else None
        if self._agree is not None:
            remedy = self._agreed(remedy, found)
        if remedy is None:
            return None
        room = has_room(cuda_devices(self.model), 2. if remedy.fp32 else 1.)
        cannot = self._agree(not room) if self._agree else not room
        return None if cannot else remedy

    def _agreed(self, own: Remedy | None, found: Findings
                ) -> Remedy | None:
        """The remedy of all ranks, or None.

        Those where it began must know one, of the same parts in fp32; the
        lowest scale fits all.
        """
        agree: Any = self._agree
        failed = found.failed is not None and found.replay != ELSEWHERE
        ranks = agree(failed)
        if not ranks or agree(failed and own is None):
            return None
        share = self._host.broadcast
        action, fp32 = share((own.action, own.fp32) if own else None,
                             ranks[0]) if share else ('retried', ())
        if agree(failed and own is not None and own.fp32 != tuple(fp32)):
            return None
        wanted = own.scale if failed and own else None
        scale = before = self.scale.scale
        while agree(wanted is not None and scale > wanted):
            scale *= self.scale.settings.backoff_factor
        return Remedy(action, scale if scale < before else None, tuple(fp32))

    def _rescue(self, window: list[MicroStep], remedy: Remedy | None
                ) -> tuple[Remedy | None, Any]:
        """Make the step again.

        Returns:
            The remedy where that was of use, and what is logged of it.
        """
        if remedy is None:
            return None, None
        rng = self._transaction.rng_now()
        for attempt in _attempts(remedy, len(window), self.scale.settings):
            logged, norm = retry(window, attempt, self._host,
                                 self._transaction, self._carry,
                                 self.history.sane)
            self.flag = None
            fails = norm is None
            if not (self._agree(fails) if self._agree else fails):
                self._accept(window)
                self.history.accept(norm)
                return attempt, logged
            self._transaction.rollback()
            # As after a skipped step, wherever it has failed.
            rng.restore()
            for parameter in self.model.parameters():
                parameter.grad = None
        return None, None

    def _rescale(self, evidence: Evidence, cause: Cause | None,
                 found: Findings, rescued: Remedy | None) -> float:
        """The loss scale of the next step."""
        if rescued is not None and rescued.scale is not None:
            return self.scale.fit(rescued.scale)
        if rescued is not None:
            return self.scale.update(losses_finite=True, grads_finite=True)
        if cause is not None and cause.code == 'NF101' and found.fits and (
                self._agree is None):
            return self.scale.fit(found.fits)
        return self.scale.update(
            losses_finite=not evidence.flagged
            and not self._is_its_own(cause), grads_finite=False)

    def _is_its_own(self, cause: Cause | None) -> bool:
        """Whether a single batch is at fault, and not the loss scale.

        At a lower one it would be applied the next time. Ranks do not know
        this of each other.
        """
        return self._agree is None and cause is not None and (
            cause.code in _ITS_OWN and self.stop.consecutive == 0)

    def look_again(self) -> Findings:
        """Replay the last forward of a step that was accepted.

        With the weights of now: for finding out whether anything is blamed
        where nothing is wrong.
        """
        return self._inquiry.look_again()


def _attempts(remedy: Remedy, length: int,
              rules: LossScaleSettings) -> Iterator[Remedy]:
    """A remedy, and for a window, of which one forward was measured, lower.

    Args:
        remedy: The remedy.
        length: Of the window.
        rules: Of the loss scale.
    """
    yield remedy
    lower = (remedy.scale or 0.) * rules.backoff_factor
    if length > 1 and lower >= rules.min_scale:
        yield dataclasses.replace(remedy, scale=lower)


def _sum(scalars: Sequence[Tensor]) -> Tensor | None:
    """Sum of scalars, or None for none."""
    total = None
    for scalar in scalars:
        total = scalar if total is None else total + scalar
    return total
