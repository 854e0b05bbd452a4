"""The guarded step: decide on one optimizer step, and keep the evidence.

A host feeds it the losses of each forward and the loss of each backward, and
asks it to judge each optimizer step. It knows tensors, not runners.
"""
import contextlib
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

import torch
from torch import Tensor, nn

from .finite import Anchor, bad_tensors, kind_of
from .heads import UNKNOWN, Parts, loss_terms
from .policy import LossScale, StopRule
from .records import Counts, HeadState, Incident, LossScaleChange, Where

__all__ = ['GuardedStep', 'Verdict']

Losses = Dict[str, List[Tensor]]


@dataclasses.dataclass
class Verdict:
    """What became of one optimizer step.

    Attributes:
        incident: The record of a failed step, or None.
        stop: Why training should stop, in words, or None.
    """

    incident: Optional[Incident] = None
    stop: Optional[str] = None


@dataclasses.dataclass
class _MicroStep:
    """One backward of the accumulation window."""

    loss: Tensor
    terms: Losses


def _detached(micro: _MicroStep) -> _MicroStep:
    """Without the graph, so that a window holds one graph at a time."""
    return _MicroStep(micro.loss.detach(), {
        key: [term.detach() for term in terms]
        for key, terms in micro.terms.items()
    })


class GuardedStep:
    """Evidence and decision of one optimizer's steps.

    Args:
        model: The bare model, without a distributed wrapper.
        optimizer: Its optimizer; only its parameters can carry the anchor.
        scale: Loss-scale rules.
        stop: Stop rule.
        clock: Returns epoch (or None) and global iteration, both from 1.
        rank: Process of a distributed run.
        agree: Turns this rank's "a loss was bad" into the answer that all
            ranks share. Called after a failure only.
    """

    def __init__(self,
                 model: nn.Module,
                 optimizer: torch.optim.Optimizer,
                 scale: LossScale,
                 stop: StopRule,
                 clock: Callable[[], Any],
                 rank: int = 0,
                 agree: Callable[[bool], bool] = bool) -> None:
        self.model = model
        self.scale = scale
        self.stop = stop
        self._clock = clock
        self._rank = rank
        self._agree = agree
        self._parts = Parts(model)
        self._optimizer = optimizer
        self._anchor = Anchor(self._candidates)
        self._losses: Mapping[str, Any] = {}
        self._window: List[_MicroStep] = []

    def _candidates(self) -> List[nn.Parameter]:
        """What may carry the anchor now, in the order of the model."""
        optimized = {id(parameter) for group in self._optimizer.param_groups
                     for parameter in group['params']}
        return [parameter for parameter in self.model.parameters()
                if id(parameter) in optimized]

    @contextlib.contextmanager
    def watch(self, module: Optional[nn.Module] = None) -> Iterator[None]:
        """Take in the losses that the model returns within this region.

        The hook is on the module for the length of one forward, so that
        copies of the model never carry it.

        Args:
            module: What is called, if not the model itself.
        """
        self._losses = {}
        handle = (module or self.model).register_forward_hook(self._take)
        try:
            yield
        finally:
            handle.remove()

    def _take(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Mapping):
            self._losses = output

    def attach(self, loss: Tensor) -> Tensor:
        """Return what to call ``backward`` on; no device sync.

        Args:
            loss: Scalar, unscaled.
        """
        if self._window:
            self._parts.note_owners(self._window[-1].terms)
            self._window[-1] = _detached(self._window[-1])
        terms = loss_terms(self._losses)
        self._window.append(_MicroStep(loss, terms))
        self._losses = {}
        return self._anchor.attach(loss, tuple(terms))

    def judge(self, found_inf: bool) -> Verdict:
        """Decide on an optimizer step and update scale and counters.

        Args:
            found_inf: Whether the check of the gradients, anchor included,
                failed. The gradients must still be there, not yet clipped.

        Returns:
            The verdict. A healthy step costs no device sync; a failed one
            three to four reads.
        """
        window, self._window = self._window, []
        before = self.scale.scale
        if not found_inf:
            self.scale.update(losses_finite=True, grads_finite=True)
            self.stop.update(skipped=False)
            return Verdict()
        micro, loss_bad = _worst(window)
        losses_finite = not self._agree(loss_bad)
        after = self.scale.update(losses_finite, grads_finite=False)
        # Layers may have been unfrozen or added since the last look.
        self._parts = Parts(self.model, self._parts)
        # A loss that was bad on another rank only shows in the anchor here.
        flagged = loss_bad or not losses_finite
        heads = self._heads(micro, flagged)
        stop = self.stop.update(skipped=True)
        epoch, iteration = self._clock()
        incident = Incident(
            rank=self._rank,
            epoch=epoch,
            iter=iteration,
            where=self._where(heads, flagged),
            heads=heads,
            loss_scale=LossScaleChange(before, after),
            action='aborted' if stop else 'skipped',
            counts=Counts(self.stop.consecutive, self.stop.total,
                          self.stop.steps))
        return Verdict(incident, stop)

    def _heads(self, micro: Optional[_MicroStep],
               flagged: bool) -> Dict[str, HeadState]:
        names = [name for name, _ in self._parts.parameters]
        parameters = [parameter for _, parameter in self._parts.parameters]
        bad = bad_tensors([parameter.grad for parameter in parameters])
        own = not flagged or not self._anchor.own_gradient_finite()
        bad_grads = [names[i] for i in bad
                     if own or parameters[i] is not self._anchor.parameter]
        return self._parts.state(micro.terms if micro else {}, bad_grads)

    def _where(self, heads: Mapping[str, HeadState],
               flagged: bool) -> Where:
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
        if flagged:
            return Where(phase='loss')
        return Where(phase='backward', head=_first_backward(heads))


def _worst(window: List[_MicroStep]) -> Any:
    """The first micro-step with a bad loss, else the last; one read."""
    if not window:
        return None, False
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
