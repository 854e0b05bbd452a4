"""Keep what replays of a failed step have shown, in one place."""
from __future__ import annotations

import dataclasses
import enum
from typing import Any, Generator, TypeVar

from .replay.annotations import BadAnnotation
from .replay.op_record import CallSite, OpRecord
from .replay.request import ReplayRequest

__all__ = ['Counterfactual', 'Experiment', 'Failure', 'Findings',
           'ReplayResult', 'ReplayStatus']


class Failure(str, enum.Enum):
    """How a step or a replay fails, in the order in which it is looked at.

    Nothing of what comes later is known.
    """

    RAISED = 'raised'
    LOSS = 'loss'
    GRADS = 'grads'
    BUFFERS = 'buffers'


_ORDER = (*Failure, None)


class ReplayStatus(enum.Enum):
    """What became of the first replay of a failed step."""

    NOT_MADE = enum.auto()
    NOT_REPRODUCED = enum.auto()
    REPRODUCED = enum.auto()
    #: It began in another process.
    ELSEWHERE = enum.auto()


class Counterfactual(str, enum.Enum):
    """What an experiment changes; its value begins a line of evidence."""

    FIRST = 'first'
    AGAIN = 'again'
    LOWER_SCALE = 'lower scale'
    TERM_LOWERED = 'term lowered'
    LOSSES_FP32 = 'losses in fp32'
    HEADS_FP32 = 'heads in fp32'
    PART_FP32 = 'part in fp32'
    ALL_FP32 = 'all in fp32'
    BFLOAT16 = 'bfloat16'
    LOSSES_MENDED = 'losses mended'
    ANNOTATION_REPAIRED = 'annotation repaired'
    PIXELS_REPAIRED = 'pixels repaired'
    NORMALISED = 'normalised'

    @classmethod
    def of_mode(cls, mode: str) -> Counterfactual:
        """Return the one that computes a kind of regions in fp32."""
        return cls.LOSSES_FP32 if mode == 'losses' else cls.HEADS_FP32


@dataclasses.dataclass
class Experiment:
    """What one replay has shown.

    Attributes:
        cured: Whether the failure did not come.
        words: What was changed and what came of it, in one clause.
    """

    cured: bool
    words: str


@dataclasses.dataclass
class ReplayResult:
    """What became of a replay.

    Attributes:
        failed: How it failed; None where all was finite.
        origins: Where it began, if it was looked for.
        error: Why there is no result, in words, or None.
        seen: Of the probe.
        running: Of the probe, where something raised.
        raised: Type of what was raised, if anything was.
        owners: Sites along the graph of each loss, if looked for: the
            nearest first.
        norm: L2 norm of all gradients, unscaled; None where they are bad or
            were not looked at.
        filled: The largest gradient in half on the way, as a share of
            half's largest number, if it was measured.
        losses: Value of each loss key, if origins were looked for.
    """

    failed: Failure | None = None
    origins: list[OpRecord] = dataclasses.field(default_factory=list)
    error: str | None = None
    seen: int = 0
    running: str | None = None
    raised: str | None = None
    owners: dict[str, list[CallSite]] = dataclasses.field(
        default_factory=dict)
    norm: float | None = None
    filled: float | None = None
    losses: dict[str, float] = dataclasses.field(default_factory=dict)

    def is_past(self, first: ReplayResult) -> bool:
        """Tell if this replay came further than the first, which failed."""
        return self.error is None and _ORDER.index(
            self.failed) > _ORDER.index(first.failed)


_Answer = TypeVar('_Answer')
#: Asks for replays, gets their results, and returns an answer.
Asking = Generator[ReplayRequest, ReplayResult, _Answer]


@dataclasses.dataclass
class Findings:
    """What was found out about a failed step.

    Attributes:
        status: What became of the first replay.
        failed: Of the first replay.
        origin: Where it began, or None where that was not found.
        others: Further origins that reached the same place.
        images: Entries of an incident's ``images``; None where no image
            is known to be to blame.
        blamed: The annotations among them.
        tests: Replays and what they showed, in words.
        replay: Why there is no origin, in words, or None.
        result: Of the first replay.
        trials: Replays that were made to choose among origins.
        experiments: What counterfactual replays have shown.
        proven: Those after which the whole step was finite.
        fits: The highest loss scale at which it is, or None.
        norm: Unscaled gradient norm of the step that would be saved.
        part: The part of the model that helps in fp32, or None.
        mode: The regions that help in fp32, or None.
        term: Key of a loss term, and a factor that helps.
        normalised: Mean and standard deviation that help.
    """

    status: ReplayStatus = ReplayStatus.NOT_MADE
    failed: Failure | None = None
    origin: OpRecord | None = None
    others: list[OpRecord] = dataclasses.field(default_factory=list)
    images: list[dict[str, Any]] | None = None
    blamed: list[BadAnnotation] = dataclasses.field(default_factory=list)
    tests: list[str] = dataclasses.field(default_factory=list)
    replay: str | None = None
    result: ReplayResult | None = None
    trials: int = 0
    experiments: dict[Counterfactual, Experiment] = dataclasses.field(
        default_factory=dict)
    proven: set[Counterfactual] = dataclasses.field(default_factory=set)
    fits: float | None = None
    norm: float | None = None
    part: str | None = None
    mode: str | None = None
    term: tuple[str, float] | None = None
    normalised: tuple[list[float], list[float]] | None = None

    @property
    def given(self) -> tuple[str, str] | None:
        """What was bad before any operation: its kind and its name."""
        return self.origin.given if self.origin is not None else None

    def cured(self, *names: Counterfactual) -> bool:
        """Tell if one of these was tried, and the failure did not come."""
        return any(name in self.experiments and self.experiments[name].cured
                   for name in names)

    def note_first(self) -> None:
        """Note what the replay with the probe has shown, in words."""
        result = self.result
        if result is None or result.error is not None:
            return
        words = 'with nothing changed it comes'
        if result.failed is None:
            words = 'with nothing changed it does not come'
        elif result.raised is not None:
            words += f', as {result.raised}'
        if self.given is not None:
            words += f'; it goes back to the {self.given[0]} {self.given[1]}'
        elif self.origin is not None:
            words += f'; it begins at {self.origin.op}'
        self.experiments[Counterfactual.FIRST] = Experiment(
            result.failed is None, words)

    def blame(self, faults: list[BadAnnotation]) -> None:
        """Blame annotations, with their images."""
        self.blamed = faults
        self.images = [fault.to_image() for fault in faults] or None
