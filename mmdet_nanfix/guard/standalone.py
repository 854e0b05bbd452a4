"""Do without a host, other processes and a diagnosis.

One process, a bare model that is trained by hand, and what a failed step shows
before anything is replayed.
"""
from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any, ContextManager, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..incidents import HeadState, Where
from .checks.anchor import Anchor, loss_terms
from .checks.finite import bad_tensors
from .history import History
from .protocols import (
    CapturedForward,
    Carry,
    CaughtException,
    Evidence,
    Explanation,
    MicroStep,
    OnLoss,
    Ranks,
    Remedy,
    RetryResult,
    RunConfig,
    Trainer,
)
from .rules.loss_scale import LossScale
from .state.buffers import WatchedBuffers
from .state.snapshot import Snapshot
from .state.transaction import Transaction

__all__ = ['NoDiagnosis', 'PlainTrainer', 'SingleProcess', 'StepParts']


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


@dataclasses.dataclass(frozen=True)
class StepParts:
    """What a guarded step is made of, for a diagnosis to look at.

    Attributes:
        model: The bare model.
        optimizer: Its optimizer.
        trainer: Runs forwards and backwards.
        scale: The loss scale.
        transaction: Of the steps; closed when something is replayed.
        buffers: Those that are watched, and those that are not.
        anchor: Carries the state of the losses.
        history: Of the accepted steps.
        sharded: Parameters are shards: nothing is replayed.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    trainer: Trainer
    scale: LossScale
    transaction: Transaction
    buffers: WatchedBuffers
    anchor: Anchor
    history: History
    sharded: bool = False

    def optimized(self) -> set[int]:
        """Return the ``id`` of each parameter that the optimizer has now."""
        return {id(parameter) for group in self.optimizer.param_groups
                for parameter in group['params']}


class NoDiagnosis:
    """The :class:`.Diagnosis` that replays nothing and catches nothing.

    It names what a failed step shows by the children of the model.

    Args:
        parts: Of the step.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    def note_terms(self, terms: Mapping[str, list[Tensor]]) -> None:
        """Take in nothing."""

    def accept(self, forward: CapturedForward | None) -> None:
        """Take in nothing."""

    def catch(self, *args: Any) -> CaughtException | None:
        """Let every exception be raised."""

    def look(self, window: list[MicroStep]) -> Evidence:
        """Look at losses, buffers and gradients; three reads."""
        parts = self._parts
        bad = bad_tensors([micro.loss for micro in window])
        buffers = parts.buffers.bad()
        ranks = parts.trainer.ranks.which(bool(bad or buffers))
        heads: dict[str, HeadState] = {}
        named = [(name, parameter) for name, parameter
                 in parts.model.named_parameters() if parameter.requires_grad]
        spoiled = bad_tensors([parameter.grad for _, parameter in named])
        for index, (name, parameter) in enumerate(named):
            head = heads.setdefault(name.partition('.')[0], HeadState())
            head.n_params += 1
            if index in spoiled and parameter is not parts.anchor.parameter:
                head.bad_grads.append(name)
        shown = window[bad[0] if bad else -1] if window else None
        for key, terms in (shown.terms if shown else {}).items():
            value = sum(float(term.detach().mean()) for term in terms)
            state = heads.setdefault('?', HeadState())
            state.losses[key] = value
            state.bad_losses += [key] * (value - value != 0)
        phase = 'loss' if bad or ranks and not buffers else (
            'buffers' if buffers else 'backward')
        return Evidence(window, shown, bool(ranks), buffers, [], ranks,
                        Where(phase=phase), heads)

    def explain(self, evidence: Evidence, can_retry: bool) -> Explanation:
        """Explain nothing."""
        return Explanation(evidence.where, evidence.heads,
                           replay='nothing was replayed')
