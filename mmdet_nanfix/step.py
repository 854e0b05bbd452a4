"""The guarded step: decide on one optimizer step, and keep the evidence.

A host feeds it the losses of each forward and the loss of each backward, and
asks it to judge each optimizer step. It knows tensors, not runners.
"""
import contextlib
import dataclasses
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch import Tensor, nn

from .buffers import WatchedBuffers
from .evidence import (
    first_look,
    origin_of,
    refined,
    where_raised,
)
from .finite import Anchor, bad_tensors
from .heads import Parts, loss_terms
from .locate import Locator
from .picture import Undo
from .policy import LossScale, StopRule
from .records import Counts, Incident, LossScaleChange
from .replay import Forward, Host
from .search import Findings
from .sites import Site
from .transaction import Transaction
from .trial import Raised
from .watch import Watch

__all__ = ['GuardedStep', 'Verdict']

Losses = Dict[str, List[Tensor]]
# Of a window, that are replayed to find the one with bad gradients.
_MOST_FORWARDS = 8


@dataclasses.dataclass
class Verdict:
    """What became of one optimizer step.

    Attributes:
        incident: The record of a failed step, or None.
        stop: Why training should stop, in words, or None.
        note: What the user should know beside it, or None.
    """

    incident: Optional[Incident] = None
    stop: Optional[str] = None
    note: Optional[str] = None


@dataclasses.dataclass
class _MicroStep:
    """One backward of the accumulation window.

    ``raised`` is the exception that came instead of losses, ``forward``
    what it began with.
    """

    loss: Tensor
    terms: Losses
    raised: Optional[Raised] = None
    forward: Optional[Forward] = None


def _detached(micro: _MicroStep) -> _MicroStep:
    """Without the graph, so that a window holds one graph at a time."""
    return dataclasses.replace(
        micro, loss=micro.loss.detach(), terms={
            key: [term.detach() for term in terms]
            for key, terms in micro.terms.items()})


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

    Attributes:
        flag: 0 or NaN for the window so far, where no parameter carries it.
        buffers: Those that are watched, and those that are not.
    """

    def __init__(self,
                 model: nn.Module,
                 optimizer: torch.optim.Optimizer,
                 scale: LossScale,
                 stop: StopRule,
                 clock: Callable[[], Any],
                 rank: int = 0,
                 agree: Optional[Callable[[bool], List[int]]] = None,
                 others: Sequence[Callable[[], Callable[[], Undo]]] = (),
                 sharded: bool = False,
                 host: Optional[Host] = None,
                 max_incidents: Optional[int] = 100) -> None:
        self.model = model
        self.scale = scale
        self.stop = stop
        self.flag: Optional[Tensor] = None
        self._clock = clock
        self._rank = rank
        self._agree = agree
        self._sharded = sharded
        self._parts = Parts(model)
        self._optimizer = optimizer
        self._anchor = Anchor(self._optimized)
        self._known: Tuple[Any, Set[int]] = ((), set())
        self._window: List[_MicroStep] = []
        self._transaction = Transaction(model, others)
        self._seen = Watch(self._transaction)
        self._poison: List[Tensor] = []
        self._host = host or Host()
        self._locator = Locator(model, self._transaction, self._host)
        self._left = -1 if max_incidents is None else max_incidents
        self._copies = False
        self._good: Optional[Forward] = None
        self._bad_from_the_start = set(self._parts.bad_weights())
        self._meant_weights = self._parts.infinite_constants()
        self.buffers = WatchedBuffers(model)

    def _optimized(self) -> Set[int]:
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
    def watch(self, module: Optional[nn.Module] = None) -> Iterator[None]:
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

    def attach(self, loss: Tensor) -> Optional[Tensor]:
        """Return what to call ``backward`` on; no device sync.

        Args:
            loss: Scalar, unscaled.

        Returns:
            None where there is nothing to go back through: the forward
            raised, and the step will be skipped.
        """
        if self._window:
            self._parts.note_owners(self._window[-1].terms)
            self._window[-1] = _detached(self._window[-1])
        seen, self._seen = self._seen, Watch(self._transaction)
        terms = {} if seen.raised else loss_terms(seen.losses)
        self._window.append(_MicroStep(loss, terms, seen.raised,
                                       seen.forward))
        if seen.forward is not None:
            # Once a model has written to a batch, batches are copied.
            self._copies = self._copies or seen.forward.batch.written_to
        if seen.raised is not None:
            return None
        flags = [self.buffers.flag(self._transaction.buffers(), loss.device),
                 *(flag.to(loss.device) for flag in self._poison)]
        flag = _sum([flag for flag in flags if flag is not None])
        if not self._sharded:
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

    def judge(self, found_inf: bool) -> Verdict:
        """Decide on an optimizer step and update scale and counters.

        Args:
            found_inf: Whether the check of the gradients, anchor included,
                failed. The gradients must still be there, not yet clipped.

        Returns:
            The verdict. A healthy step costs no device sync. A failed one
            takes back what the forwards changed, and replays the failing
            one a few times; its gradients are gone then.
        """
        window, self._window = self._window, []
        self.flag = None
        if not found_inf:
            self._transaction.commit()
            self.buffers.accept()
            self._good = next((micro.forward for micro in window
                               if micro.forward is not None), None)
            self.scale.update(losses_finite=True, grads_finite=True)
            self.stop.update(skipped=False)
            return Verdict()
        return self._failed(window)

    def _failed(self, window: List[_MicroStep]) -> Verdict:
        """Take back, look for the origin, record."""
        before = self.scale.scale
        epoch, iteration = self._clock()
        micro, loss_bad = _worst(window)
        bad_buffers = self.buffers.bad()
        here = loss_bad or bool(bad_buffers)
        ranks = ([self._rank] if here else []) if self._agree is None else (
            self._agree(here))
        after = self.scale.update(losses_finite=not ranks,
                                  grads_finite=False)
        # Layers may have been unfrozen or added since the last look.
        self._parts = parts = Parts(self.model, self._parts)
        bad_grads = self._bad_grads(bool(ranks))
        terms = micro.terms if micro else {}
        heads = parts.state(terms, bad_grads)
        where = first_look(parts, heads, loss_bad, bad_buffers, bool(ranks),
                           self._meant_weights)
        note = self.buffers.suspect(bad_buffers) if (
            where.phase == 'buffers') else None
        self._transaction.rollback()
        found = self._find(window, micro, before, loss_bad)
        if ranks and self._rank not in ranks:
            found.replay = 'it began on another rank'
        if found.outcome is not None:
            parts.note_sites({
                key: [site.module for site in sites]
                for key, sites in found.outcome.owners.items()})
            heads = parts.state(terms, bad_grads)
        stop = self.stop.update(skipped=True)
        raised = micro.raised if micro else None
        if raised is not None and raised.error:
            where = where_raised(raised, parts, found.outcome.running
                                 if found.outcome is not None else None)
        incident = Incident(
            rank=self._rank,
            epoch=epoch,
            iter=iteration,
            where=refined(where, found, parts, self._by_step),
            heads=heads,
            loss_scale=LossScaleChange(before, after),
            action='aborted' if stop else 'skipped',
            counts=Counts(self.stop.consecutive, self.stop.total,
                          self.stop.steps),
            images=found.images or (
                [bad.to_image() for bad in raised.bad] or None
                if raised else None),
            error=raised.error or None if raised else None,
            ranks=ranks or None if self._agree is not None else None,
            origin=origin_of(found),
            replay=found.replay)
        return Verdict(incident, stop, note)

    def _bad_grads(self, flagged: bool) -> List[str]:
        """Names of parameters whose own gradient is bad; two reads."""
        named = self._parts.parameters
        bad = bad_tensors([parameter.grad for _, parameter in named])
        own = not flagged or not self._anchor.own_gradient_finite()
        return [named[i][0] for i in bad
                if own or named[i][1] is not self._anchor.parameter]

    def _find(self, window: List[_MicroStep], micro: Optional[_MicroStep],
              scale: float, loss_bad: bool) -> Findings:
        """Replay the failing forward, as long as that is allowed.

        Where gradients alone are bad, any forward of the window may have
        made them so: the last first.
        """
        if self._sharded:
            return Findings(replay='parameters are shards')
        if self._left == 0:
            return Findings(replay='there were too many before')
        self._left -= self._left > 0
        alike = [micro] if loss_bad or micro is None else window[::-1]
        first = None
        for item in alike[:_MOST_FORWARDS]:
            found = self._locator.find(
                item.forward if item is not None else None,
                self._good.batch if self._good else None, scale,
                self.buffers, self._agree,
                raised=item.raised.error.partition(':')[0]
                if item is not None and item.raised else None,
                meant=self._meant_weights)
            first = first or found
            failed = found.failed is not None
            if self._agree(failed) if self._agree else failed:
                return found
        return first or Findings(replay='no batch was seen')

    def look_again(self) -> Findings:
        """Replay the last forward of a step that was accepted.

        With the weights of now: for finding out whether anything is blamed
        where nothing is wrong.
        """
        if self._good is None:
            return Findings(replay='no step was accepted yet')
        return self._locator.find(self._good, None, self.scale.scale,
                                  self.buffers, self._agree,
                                  meant=self._meant_weights)

    def _by_step(self, weight: str) -> Optional[str]:
        """The optimizer, where it has made a weight bad.

        It has, where the weight was fine at first, and nobody else moves it.
        """
        parameter = dict(self.model.named_parameters())[weight]
        moved = parameter.requires_grad and (
            id(parameter) in self._optimized())
        if not moved or weight in self._bad_from_the_start:
            return None
        return f'{type(self._optimizer).__name__}.step'


def _sum(scalars: Sequence[Tensor]) -> Optional[Tensor]:
    """Sum of scalars, or None for none."""
    total = None
    for scalar in scalars:
        total = scalar if total is None else total + scalar
    return total


def _worst(window: List[_MicroStep]) -> Tuple[Optional[_MicroStep], bool]:
    """The micro-step to show, and whether its loss is bad; one read.

    One that raised, else the first with a bad loss, else the last.
    """
    if not window:
        return None, False
    for micro in window:
        if micro.raised is not None:
            return micro, True
    bad = bad_tensors([micro.loss for micro in window])
    return (window[bad[0]], True) if bad else (window[-1], False)
