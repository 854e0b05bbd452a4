"""Run a bare model again, in one process and in full precision."""
from __future__ import annotations

import contextlib
import types
from typing import Any, ContextManager, Iterable, Sequence

from torch import Tensor, nn

from .checks.anchor import loss_terms
from .protocols import (
    CapturedForward,
    Carry,
    OnLoss,
    Ranks,
    Remedy,
    RetryResult,
    RunConfig,
)
from .state.snapshot import Snapshot

__all__ = ['PlainTrainer', 'SingleProcess']


class SingleProcess:
    """The :class:`.Ranks` of a run in one process."""

    alone = True
    rank = 0

    def which(self, flag: bool) -> list[int]:
        """Return the ranks on which a flag is up."""
        return [0] * flag

    def share(self, value: Any, source: int) -> Any:
        """Return the value."""
        return value

    def barrier(self) -> None:
        """There is nobody to wait for."""


class PlainTrainer:
    """The :class:`.Trainer` of a model that is trained by hand.

    Args:
        model: The model; its losses are summed.
        ranks: The processes; None for one.
    """

    half = False
    whole_steps = False
    can_retry = False
    untraced: Sequence[types.ModuleType] = ()

    def __init__(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        self._model = model
        self.ranks: Ranks = ranks or SingleProcess()
        self.config = RunConfig()

    def clock(self) -> tuple[int | None, int]:
        """Return no epoch, and the first iteration."""
        return None, 1

    def position(self) -> int:
        """Return the number of backwards so far."""
        return 0

    def remember(self) -> Snapshot:
        """Remember nothing outside of the model."""
        return Snapshot()

    def half_op(self) -> tuple[str | None, int]:
        """Return that no half operation is emulated."""
        return None, 0

    def replay(self, forward: CapturedForward, batch: Any, on_loss: OnLoss,
               precision: Sequence[str] = ()) -> None:
        """Call the model, and hand over the sum of its losses."""
        args = [batch[key] for key in batch if isinstance(key, int)]
        kwargs = {key: batch[key] for key in batch if isinstance(key, str)}
        with self.forward_region():
            losses = loss_terms(self._model(*args, **kwargs))
        total = sum(term.mean() for terms in losses.values()
                    for term in terms)
        if isinstance(total, Tensor):
            with self.backward_region():
                on_loss(total)

    def forward_region(self) -> ContextManager[Any]:
        """Region that a forward runs in."""
        return contextlib.nullcontext()

    def backward_region(self) -> ContextManager[Any]:
        """Region that a backward runs in."""
        return contextlib.nullcontext()

    def retry(self, batches: Iterable[Any], length: int, remedy: Remedy,
              carry: Carry) -> RetryResult:
        """Make nothing again."""
        return RetryResult()
