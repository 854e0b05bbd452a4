"""What replays and retries need of whoever runs the training."""
from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import (
    Any,
    Callable,
    ContextManager,
    Mapping,
    Protocol,
    Sequence,
)

from torch import Tensor

__all__ = ['Configured', 'Host', 'Retries']

#: Called with a loss, unscaled, and the arguments of its ``backward``.
OnLoss = Callable[..., None]


@dataclasses.dataclass
class Configured:
    """What a config says, as far as a change of it must know.

    Attributes:
        clips_anew: Whether it has a ``clip_grad`` that is no dict of a norm,
            so that nothing can be merged with it.
        by_hook: Whether settings are those of the ``NanGuardHook``.
        model: The config of the model, or None where it is not known.
    """

    clips_anew: bool = False
    by_hook: bool = False
    model: Mapping[str, Any] | None = None


class Retries(Protocol):
    """Makes forwards and backwards again, with gradients that count."""

    def at(self, scale: float, fp32: Sequence[str]) -> ContextManager[Any]:
        """Region of a retry, at another loss scale and precision."""

    def run(self, batch: Any, to_come: int,
            carry: Callable[[Tensor], Tensor]) -> Any:
        """Run the whole step of a batch, but for the update.

        Args:
            batch: The batch.
            to_come: Number of backwards of the window after this one.
            carry: Gives what to call ``backward`` on for a loss.

        Returns:
            What the model's training step returns for the log.
        """

    def found_inf(self) -> bool:
        """Result of the check of the gradients, which are unscaled then."""

    def norm(self) -> float | None:
        """Their L2 norm, unscaled."""


@dataclasses.dataclass
class Host:
    """What a replay needs of whoever runs the training.

    Attributes:
        train_step: Runs the model's own step on a batch, without an
            optimizer, and hands over the loss; None where there is none.
            Its last argument is the place of the forward.
        forward: Region that a forward runs in.
        backward: Region that a backward runs in.
        foreign: Modules of compiled functions that torch does not dispatch.
        precision: Region of more precision, see :class:`Request`.
        half: Whether the run is in half precision.
        fp32: The setting of that name.
        place: Number of backwards so far, when one begins.
        retries: Makes a step again that is to count, or None.
        config: What the run was configured with.
        broadcast: Gives all processes a plain value of one of them; None
            where there is one, or no way to.
    """

    train_step: Callable[[Any, OnLoss, int], None] | None = None
    forward: Callable[[], ContextManager[Any]] = contextlib.nullcontext
    backward: Callable[[], ContextManager[Any]] = contextlib.nullcontext
    foreign: Sequence[types.ModuleType] = ()
    precision: Callable[[Sequence[str]], ContextManager[Any]] = (
        lambda fp32: contextlib.nullcontext())
    half: bool = False
    fp32: str | None = None
    place: Callable[[], int] = lambda: 0
    retries: Retries | None = None
    config: Configured = dataclasses.field(
        default_factory=lambda: Configured())
    broadcast: Callable[[Any, int], Any] | None = None
