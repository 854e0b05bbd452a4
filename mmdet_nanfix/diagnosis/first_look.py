"""Look at a failed step: what shows before anything is replayed."""
from __future__ import annotations

import math
from typing import Mapping, Sequence

from ..guard import MicroStep
from ..guard.checks import bad_tensors
from ..incidents import HeadState, Where
from .parts import UNKNOWN, ModelParts

__all__ = ['find_where', 'worst_of']


def worst_of(window: Sequence[MicroStep]) -> tuple[MicroStep | None, bool]:
    """Select the micro-step to show, and tell if its loss is bad; one read.

    One that raised, else the first with a bad loss, else the last.
    """
    if not window:
        return None, False
    for micro in window:
        if micro.caught is not None:
            return micro, True
    bad = bad_tensors([micro.loss for micro in window])
    return (window[bad[0]], True) if bad else (window[-1], False)


def find_where(parts: ModelParts, heads: Mapping[str, HeadState],
               loss_bad: bool, bad_buffers: Sequence[str], flagged: bool
               ) -> Where:
    """Find phase and head as far as they show without a replay.

    Args:
        parts: Of the model.
        heads: Their state.
        loss_bad: Whether a loss is not finite.
        bad_buffers: Names of buffers that are not.
        flagged: Whether a loss or a buffer is bad on any rank.
    """
    weights = [name for name in parts.bad_weights()
               if name not in parts.constants]
    if weights:
        return Where(phase='params', module=weights[0].rpartition('.')[0],
                     head=parts.owner_of_name(weights[0]))
    with_losses = [state for state in heads.values() if state.losses]
    bad = {name: state for name, state in heads.items() if state.bad_losses}
    if bad:
        name, state = next(iter(bad.items()))
        # Where all heads are bad, what they share is to blame.
        shared = len(bad) == len(with_losses) > 1
        return Where(phase='loss',
                     head=None if shared or name == UNKNOWN else name,
                     kind=_kind(state.losses[state.bad_losses[0]]))
    if bad_buffers and not loss_bad:
        return Where(phase='buffers', module=bad_buffers[0],
                     head=parts.owner_of_name(bad_buffers[0]))
    if flagged:
        return Where(phase='loss')
    return Where(phase='backward', head=_first_backward(heads))


def _kind(value: float) -> str | None:
    """``nan``, ``inf`` or ``-inf``; None for a finite number."""
    return None if math.isfinite(value) else str(value)


def _first_backward(heads: Mapping[str, HeadState]) -> str | None:
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
