"""Say what a replay changes and looks at."""
from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Tuple

import torch

__all__ = ['ReplayRequest', 'can_replay', 'is_out_of_memory']

#: An operation and the line it is called from.
Place = Tuple[str, 'str | None']


def can_replay() -> bool:
    """Tell if this torch has what the probe asks for."""
    return hasattr(torch._C, '_current_autograd_node')


def is_out_of_memory(error: BaseException) -> bool:
    """Tell if an exception says that there is no memory left."""
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        'out of memory' in str(error))


@dataclasses.dataclass
class ReplayRequest:
    """A replay that is asked for: what is changed, what is looked at.

    Attributes:
        batch: In the place of the one that failed, or None for that.
        probe: Whether origins are looked for.
        mended: Name and source of operations whose results are set to 0.
        until: The way to fail that is asked about, of :class:`.Failure`:
            what comes after it is not looked at.
        scale: Loss scale, or None for that of the step.
        precision: What is computed in fp32 beside what the run computes so,
            as for :meth:`.Trainer.replay`.
        factors: Factors of loss terms by key.
        normalised: Mean and standard deviation of the data preprocessor.
        gauge: Whether it is measured how far gradients fill half's range.
    """

    batch: Any | None = None
    probe: bool = False
    mended: frozenset[Place] = frozenset()
    until: str | None = None
    scale: float | None = None
    precision: tuple[str, ...] = ()
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    normalised: tuple[list[float], list[float]] | None = None
    gauge: bool = False

    def shared(self) -> dict[str, Any]:
        """Return what is the same in all processes: no batch, no origins."""
        return {'until': self.until, 'scale': self.scale,
                'precision': self.precision, 'factors': dict(self.factors),
                'gauge': self.gauge}
