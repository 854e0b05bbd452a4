"""Say what the guard needs of others, and what they hand to each other.

Three ways lead up from the guard, and no other: :class:`Ranks`,
:class:`Trainer` and :class:`Diagnosis`.
"""
from __future__ import annotations

import dataclasses
import types
from typing import Any, Callable, Iterable, Mapping, Protocol, Sequence

from torch import Tensor, nn

from ..incidents import Cause, HeadState, Where
from .rules.boundary import in_words
from .state.batch import BatchSnapshot, Rng
from .state.snapshot import Snapshot

__all__ = [
    'CapturedForward', 'CaughtException', 'Diagnosis', 'Evidence',
    'Explanation', 'MicroStep', 'OnLoss', 'Ranks', 'Remedy', 'RetryResult',
    'RunConfig', 'Trainer'
]

#: Called with a loss, unscaled, and the arguments of its ``backward``.
OnLoss = Callable[..., None]
Carry = Callable[[Tensor], Tensor]


@dataclasses.dataclass
class RunConfig:
    """What a config says, as far as a change of it must know.

    Attributes:
        clips_anew: Whether it has a ``clip_grad`` that is no dict of a norm,
            so that nothing can be merged with it.
        by_hook: Whether settings are those of the ``NanGuardHook``.
        model: The config of the model, or None where it is not known.
        fp32: Which regions the run computes in fp32, or None.
    """

    clips_anew: bool = False
    by_hook: bool = False
    model: Mapping[str, Any] | None = None
    fp32: str | None = None


@dataclasses.dataclass
class CapturedForward:
    """What one forward began with.

    Attributes:
        batch: What the model was given.
        rng: The random number generators.
        whole_step: Whether the batch is that of a ``train_step``, else it
            is the arguments of the forward.
        position: Number of backwards before its own.
    """

    batch: BatchSnapshot
    rng: Rng
    whole_step: bool
    position: int = 0


@dataclasses.dataclass
class CaughtException:
    """An exception that a forward raised and that its step is skipped for.

    Attributes:
        kind: Its type by name; empty where nothing was raised, and the
            backward was left out.
        text: Its type and text, on one line.
        details: What the diagnosis knows of it.
    """

    kind: str = ''
    text: str = ''
    details: Any = None

    @classmethod
    def of(cls, error: BaseException, details: Any = None) -> CaughtException:
        """Take down an exception."""
        return cls(type(error).__name__, in_words(error, 500), details)


@dataclasses.dataclass
class MicroStep:
    """One backward of the accumulation window.

    Attributes:
        loss: Its loss, unscaled.
        terms: Terms of the loss by key.
        caught: The exception that came instead of losses.
        forward: What it began with, or None.
    """

    loss: Tensor
    terms: dict[str, list[Tensor]]
    caught: CaughtException | None = None
    forward: CapturedForward | None = None

    def detached(self) -> MicroStep:
        """Let go of the graph, so that a window holds one at a time."""
        return dataclasses.replace(
            self, loss=self.loss.detach(), terms={
                key: [term.detach() for term in terms]
                for key, terms in self.terms.items()})


@dataclasses.dataclass
class Remedy:
    """What a failed step is made again with.

    Attributes:
        action: ``retried`` or ``rescued_fp32_head``, as in an incident.
        scale: The loss scale, or None for the same.
        fp32: What is computed in fp32: kinds of regions, or modules.
    """

    action: str
    scale: float | None = None
    fp32: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as an incident's ``remedy``."""
        return {'scale': self.scale, 'fp32': list(self.fp32)}


@dataclasses.dataclass
class RetryResult:
    """What became of a step that was made again.

    Attributes:
        logged: What the model's training step returned for the log.
        norm: L2 norm of the gradients, which are there and unscaled; None
            where they are not finite.
        error: What it raised, in words, or None.
    """

    logged: Any = None
    norm: float | None = None
    error: str | None = None


@dataclasses.dataclass
class Evidence:
    """What a failed step shows before anything is undone or replayed.

    Attributes:
        window: Its micro-steps.
        shown: The micro-step to show, or None.
        flagged: Whether a loss or a buffer is bad in any process.
        bad_buffers: Names of buffers that are not finite.
        bad_grads: Names of parameters with a gradient that is not finite.
        ranks: Processes where it began, as far as that shows.
        where: Phase and head, as far as they show.
        heads: State of every part of the model.
    """

    window: list[MicroStep]
    shown: MicroStep | None = None
    flagged: bool = False
    bad_buffers: list[str] = dataclasses.field(default_factory=list)
    bad_grads: list[str] = dataclasses.field(default_factory=list)
    ranks: list[int] = dataclasses.field(default_factory=list)
    where: Where = dataclasses.field(default_factory=Where)
    heads: dict[str, HeadState] = dataclasses.field(default_factory=dict)

    @property
    def caught(self) -> CaughtException | None:
        """The exception that the step raised, if any."""
        return self.shown.caught if self.shown else None


@dataclasses.dataclass
class Explanation:
    """What is known of a failed step in the end.

    Attributes:
        where: Where it began.
        heads: State of every part of the model.
        cause: The verdict, or None where it began in another process.
        remedy: What has helped in a replay, or None.
        fits: The highest loss scale at which the step is finite, or None.
        failed_here: Whether a replay has failed in this process.
        images: Entries of an incident's ``images``, or None.
        origin: The incident's ``origin``, or None.
        replay: Why there is no origin, in words, or None.
    """

    where: Where
    heads: dict[str, HeadState]
    cause: Cause | None = None
    remedy: Remedy | None = None
    fits: float | None = None
    failed_here: bool = False
    images: list[dict[str, Any]] | None = None
    origin: dict[str, Any] | None = None
    replay: str | None = None


class Ranks(Protocol):
    """The processes of a run.

    Attributes:
        alone: Whether this is the only one. Else exceptions cannot be
            looked into, and replays are made by all together.
        rank: This one.
    """

    alone: bool
    rank: int

    def which(self, flag: bool) -> list[int]:
        """Return the ranks on which a flag is up; a collective."""

    def share(self, value: Any, source: int) -> Any:
        """Return a plain value of one rank on all; a collective."""

    def barrier(self) -> None:
        """Wait for all."""


class Trainer(Protocol):
    """What the guard needs of a training loop; one class for each host.

    Attributes:
        ranks: The processes.
        half: Whether the run is in half precision.
        config: What it was configured with.
        whole_steps: Whether a ``train_step`` of the model can be replayed.
        can_retry: Whether a step can be made again so that it counts.
        untraced: Modules of compiled functions that torch does not dispatch.
    """

    ranks: Ranks
    half: bool
    config: RunConfig
    whole_steps: bool
    can_retry: bool
    untraced: Sequence[types.ModuleType]

    def clock(self) -> tuple[int | None, int]:
        """Return epoch, or None, and global iteration, both from 1."""

    def position(self) -> int:
        """Return the number of backwards so far."""

    def remember(self) -> Snapshot:
        """Remember state outside of the model that a forward advances."""

    def half_op(self) -> tuple[str | None, int]:
        """Return the half operation that is emulated right now, or None.

        With it a number that tells one call from the next.
        """

    def replay(self, forward: CapturedForward, batch: Any, on_loss: OnLoss,
               precision: Sequence[str] = ()) -> None:
        """Run a forward again, and hand over its loss; nothing is stepped.

        Args:
            forward: What it began with.
            batch: The batch, or another in its place.
            on_loss: Called with the loss.
            precision: What is computed in fp32 beside what the run computes
                so: ``losses``, ``heads``, ``all``, or paths of modules.
                ``bfloat16`` is another dtype of autocast.
        """

    def retry(self, batches: Iterable[Any], length: int, remedy: Remedy,
              carry: Carry) -> RetryResult:
        """Make a window again, all but the update.

        Args:
            batches: Its batches; taking one prepares its forward.
            length: Their number.
            remedy: With what.
            carry: Gives what to call ``backward`` on for a loss.
        """


class Diagnosis(Protocol):
    """Explains failed steps; without one the guard skips them."""

    def note_terms(self, terms: Mapping[str, list[Tensor]]) -> None:
        """Take in the loss terms of a micro-step that a new one follows."""

    def accept(self, forward: CapturedForward | None) -> None:
        """Take in an accepted step by what it began with."""

    def catch(self, error: Exception, module: nn.Module,
              forward: Callable[..., Any], args: tuple[Any, ...],
              kwargs: Mapping[str, Any], rng: Rng
              ) -> CaughtException | None:
        """Tell if an exception comes from something that is not finite.

        Args:
            error: What a forward raised.
            module: What was called.
            forward: Its forward.
            args: What it was called with.
            kwargs: Likewise.
            rng: The generators when it was called.

        Returns:
            None where it does not, and has to be raised.
        """

    def look(self, window: list[MicroStep]) -> Evidence:
        """Look at a failed step; its gradients are still there."""

    def explain(self, evidence: Evidence, can_retry: bool) -> Explanation:
        """Explain a failed step, whose changes are undone; may replay it.

        Args:
            evidence: Of :meth:`look`.
            can_retry: Whether the step can be made again.
        """
