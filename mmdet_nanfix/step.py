"""The guarded step: decide on one optimizer step, and keep the evidence.

A host feeds it the losses of each forward and the loss of each backward, and
asks it to judge each optimizer step. It knows tensors, not runners.
"""
import contextlib
import dataclasses
import math
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch import Tensor, nn

from .buffers import WatchedBuffers
from .finite import Anchor, bad_tensors, kind_of
from .heads import UNKNOWN, Parts, loss_terms
from .picture import Undo
from .policy import LossScale, StopRule
from .records import Counts, HeadState, Incident, LossScaleChange, Where
from .transaction import Transaction
from .trial import Raised, why

__all__ = ['GuardedStep', 'Verdict']

Losses = Dict[str, List[Tensor]]


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

    ``raised`` is the exception that came instead of losses.
    """

    loss: Tensor
    terms: Losses
    raised: Optional[Raised] = None


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
                 sharded: bool = False) -> None:
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
        self._losses: Mapping[str, Any] = {}
        self._window: List[_MicroStep] = []
        self._transaction = Transaction(model, others)
        self._raised: Optional[Raised] = None
        self._poison: List[Tensor] = []
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
        begins the transaction. The hook is on the module for the length of
        one forward, so that copies of the model never carry it. In a single
        process a forward that raises because of non-finite numbers or of a
        bad annotation returns a NaN loss instead.

        Args:
            module: What is called, if not the model itself.
        """
        self._transaction.begin()
        self._losses, self._raised, self._poison = {}, None, []
        module = module or self.model
        handle = module.register_forward_hook(self._take)
        try:
            with self._catching(module) if self._agree is None else (
                    contextlib.nullcontext()):
                yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def _catching(self, module: nn.Module) -> Iterator[None]:
        """Let the module's forward pass through :meth:`_try`."""
        own = module.__dict__.get('forward')
        forward = module.forward

        def caught(*args: Any, **kwargs: Any) -> Any:
            return self._try(module, forward, args, kwargs)

        module.__dict__['forward'] = caught
        try:
            yield
        finally:
            if own is None:
                del module.__dict__['forward']
            else:
                module.__dict__['forward'] = own

    def _try(self, module: nn.Module, forward: Callable[..., Any],
             args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        rng = self._transaction.rng_now()
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            self._raised = why(error, module, forward, args, kwargs, rng,
                               self._transaction.reset)
            if self._raised is None:
                raise
            self._transaction.reset()
        device = next((parameter.device for parameter in
                       module.parameters()), torch.device('cpu'))
        return {'loss': torch.full((), math.nan, device=device)}

    def _take(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Mapping):
            self._losses = output

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
        terms = {} if self._raised else loss_terms(self._losses)
        self._window.append(_MicroStep(loss, terms, self._raised))
        self._losses = {}
        if self._raised is not None:
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
        self._window[-1].raised = Raised('', None, None, None, [])

    def judge(self, found_inf: bool) -> Verdict:
        """Decide on an optimizer step and update scale and counters.

        Args:
            found_inf: Whether the check of the gradients, anchor included,
                failed. The gradients must still be there, not yet clipped.

        Returns:
            The verdict. A healthy step costs no device sync; a failed one
            four to five reads, and takes back what the forwards changed.
        """
        window, self._window = self._window, []
        self.flag = None
        if not found_inf:
            self._transaction.commit()
            self.buffers.accept()
            self.scale.update(losses_finite=True, grads_finite=True)
            self.stop.update(skipped=False)
            return Verdict()
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
        self._parts = Parts(self.model, self._parts)
        heads = self._heads(micro, bool(ranks))
        where = self._where(heads, loss_bad, bad_buffers, bool(ranks))
        note = self.buffers.suspect(bad_buffers) if (
            where.phase == 'buffers') else None
        self._transaction.rollback()
        stop = self.stop.update(skipped=True)
        raised = micro.raised if micro else None
        if raised is not None and raised.error:
            where = self._where_raised(raised)
        incident = Incident(
            rank=self._rank,
            epoch=epoch,
            iter=iteration,
            where=where,
            heads=heads,
            loss_scale=LossScaleChange(before, after),
            action='aborted' if stop else 'skipped',
            counts=Counts(self.stop.consecutive, self.stop.total,
                          self.stop.steps),
            images=[bad.to_image() for bad in raised.bad] or None if (
                raised) else None,
            error=raised.error or None if raised else None,
            ranks=ranks or None if self._agree is not None else None)
        return Verdict(incident, stop, note)

    def _where_raised(self, raised: Raised) -> Where:
        module = raised.module
        return Where(phase='forward', module=module, op=raised.op,
                     source=raised.source, head=(
                         self._parts.owner_of_name(f'{module}.')
                         if module else None))

    def _heads(self, micro: Optional[_MicroStep],
               flagged: bool) -> Dict[str, HeadState]:
        names = [name for name, _ in self._parts.parameters]
        parameters = [parameter for _, parameter in self._parts.parameters]
        bad = bad_tensors([parameter.grad for parameter in parameters])
        own = not flagged or not self._anchor.own_gradient_finite()
        bad_grads = [names[i] for i in bad
                     if own or parameters[i] is not self._anchor.parameter]
        return self._parts.state(micro.terms if micro else {}, bad_grads)

    def _where(self, heads: Mapping[str, HeadState], loss_bad: bool,
               bad_buffers: List[str], flagged: bool) -> Where:
        """Phase and head as far as they show without a replay."""
        weights = self._parts.bad_weights()
        if weights:
            return Where(phase='params', module=weights[0].rpartition('.')[0],
                         head=self._parts.owner_of_name(weights[0]))
        with_losses = [state for state in heads.values() if state.losses]
        bad = {name: state for name, state in heads.items()
               if state.bad_losses}
        if bad:
            name, state = next(iter(bad.items()))
            # Where all heads are bad, what they share is to blame.
            shared = len(bad) == len(with_losses) > 1
            return Where(phase='loss',
                         head=None if shared or name == UNKNOWN else name,
                         kind=kind_of(state.losses[state.bad_losses[0]]))
        if bad_buffers and not loss_bad:
            return Where(phase='buffers', module=bad_buffers[0],
                         head=self._parts.owner_of_name(bad_buffers[0]))
        if flagged:
            return Where(phase='loss')
        return Where(phase='backward', head=_first_backward(heads))


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


def _first_backward(heads: Mapping[str, HeadState]) -> Optional[str]:
    """The part where a bad gradient most likely began.

    Gradients flow from the losses down, so a part with losses of its own
    comes before one without; among those the one with the largest bad share.
    """
    bad = {name: state for name, state in heads.items() if state.bad_grads}
    if not bad:
        return None
    own = {name: len(state.bad_grads) / max(state.n_params, 1)
           for name, state in bad.items() if state.losses}
    if own:
        return max(own, key=lambda name: own[name])
    # The modules come in the order of the forward: the last is nearest.
    return list(bad)[-1]
