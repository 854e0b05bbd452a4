"""Describe a failed optimizer step: the incident and its parts.

JSON has no non-finite numbers, so in a log these are the strings ``"nan"``,
``"inf"`` and ``"-inf"``.
"""
from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
from typing import Any

from .codes import TITLES

__all__ = [
    'Cause', 'Counts', 'HeadState', 'Incident', 'LossScaleChange',
    'NonFiniteError', 'SCHEMA', 'Where', 'short_source'
]

#: Version of the log's keys.
SCHEMA = 1


def short_source(source: str) -> str:
    """``file:line`` without the path to the installed packages."""
    # Debian, NGC and Colab install to dist-packages.
    *_, below = re.split('(?:site|dist)-packages/', source.replace('\\', '/'))
    if below != source.replace('\\', '/'):
        return below
    try:
        here = os.path.relpath(source) if os.path.isabs(source) else source
    except (OSError, ValueError):
        # No working directory any more, or another drive.
        return source
    return source if here.startswith('..') else here


@dataclasses.dataclass
class Where:
    """Place of origin; what is not known is None.

    Attributes:
        phase: ``input`` ``forward`` ``loss`` ``backward`` ``step``
            ``params`` ``buffers``.
        head: Part of the model, such as ``roi_head.bbox_head``.
        module: Full module path.
        level: Feature level.
        op: The operation.
        source: ``file:line`` in the user's or the host's code.
        kind: ``nan`` ``inf`` ``-inf``.
    """

    phase: str | None = None
    head: str | None = None
    module: str | None = None
    level: int | None = None
    op: str | None = None
    source: str | None = None
    kind: str | None = None


@dataclasses.dataclass
class HeadState:
    """What one part of the model looked like in the failing step.

    Attributes:
        losses: Value of each loss key that this part computed.
        bad_losses: Keys whose value was not finite.
        bad_grads: Parameters whose own gradient was not finite, seen before
            clipping.
        n_params: Trainable parameters of this part.
    """

    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    bad_losses: list[str] = dataclasses.field(default_factory=list)
    bad_grads: list[str] = dataclasses.field(default_factory=list)
    n_params: int = 0

    @property
    def fine(self) -> bool:
        """Whether nothing here was non-finite."""
        return not self.bad_losses and not self.bad_grads


@dataclasses.dataclass
class LossScaleChange:
    """The loss scale of the failing step and of the next."""

    before: float
    after: float


@dataclasses.dataclass
class Cause:
    """Verdict on an incident.

    Attributes:
        code: NF101 to NF113, see :data:`.TITLES`.
        evidence: What decided it; each line begins with the name of the
            replay, or of the reading of the run's state, that showed it.
        advice: What helps, and what does not.
        config_patch: Python to paste into the config, or None.
        title: The code in words.
    """

    code: str
    evidence: list[str]
    advice: str
    config_patch: str | None = None
    title: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.title = TITLES[self.code]


@dataclasses.dataclass
class Counts:
    """Skipped steps in a row, skipped in all, optimizer steps in all."""

    consecutive: int
    total: int
    steps: int


@dataclasses.dataclass
class Incident:
    """One failing optimizer step.

    Attributes:
        time: ISO 8601, with the zone.
        rank: Process of a distributed run.
        epoch: From 1, or None where the runner has none.
        iter: Global iteration, from 1.
        where: Place of origin.
        heads: State of every part of the model, by name.
        images: Images to blame, or None where they are not known.
        loss_scale: Before and after.
        cause: Verdict, or None where it began in another process.
        error: The exception that the step raised, or None.
        ranks: Processes of a distributed run where it began, or None where
            that is not known.
        origin: All that a replay has found out about where it began, with
            amax, counts, dtype and shape of inputs and results; or None.
        replay: Why no origin was found, in words, or None.
        remedy: What a step was made again with: ``scale`` and ``fp32``; or
            None.
        action: ``skipped`` ``retried`` ``rescued_fp32_head`` ``aborted``.
        counts: Counters after this step.
    """

    rank: int
    epoch: int | None
    iter: int
    where: Where
    heads: dict[str, HeadState]
    loss_scale: LossScaleChange
    action: str
    counts: Counts
    images: list[dict[str, Any]] | None = None
    cause: Cause | None = None
    error: str | None = None
    ranks: list[int] | None = None
    origin: dict[str, Any] | None = None
    replay: str | None = None
    remedy: dict[str, Any] | None = None
    time: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now().astimezone().
        isoformat(timespec='milliseconds'))
    schema: int = SCHEMA

    def to_json(self) -> str:
        """One line of strict JSON, without a line break."""
        return json.dumps(self.to_dict(), allow_nan=False,
                          ensure_ascii=False)

    def to_dict(self) -> dict[str, Any]:
        """As a reader of the log gets it."""
        return _spell({'schema': self.schema, 'time': self.time,
                       **dataclasses.asdict(self)})


class NonFiniteError(FloatingPointError):
    """Training was stopped because non-finite steps did not end.

    Args:
        message: What happened, where, and what to do.
        incident: The last one.
    """

    def __init__(self, message: str,
                 incident: Incident | None = None) -> None:
        super().__init__(message)
        self.incident = incident


def _spell(value: Any) -> Any:
    """Replace non-finite numbers by their names, all the way down."""
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return 'nan' if math.isnan(value) else str(value)
    return value
