"""Making a failed step again, where experiments have shown with what.

Never with gradients that are absurd: at a low enough loss scale, or in fp32,
those of any batch are finite, and a corrupt one would be applied.
"""
from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional, Sequence

from torch import Tensor

from .host import Host
from .incidents import Cause
from .inquiry import MicroStep
from .search import Findings
from .transaction import Transaction

__all__ = ['Remedy', 'choose', 'retry']

Sane = Callable[[float], Optional[bool]]


@dataclasses.dataclass
class Remedy:
    """What a step is made again with.

    Attributes:
        action: ``retried`` or ``rescued_fp32_head``.
        scale: The loss scale, or None for the same.
        fp32: What is computed in fp32, as for :class:`.Request`.
    """

    action: str
    scale: float | None = None
    fp32: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As an incident's ``remedy``."""
        return {'scale': self.scale, 'fp32': list(self.fp32)}


def choose(cause: Cause | None, found: Findings,
           sane: Sane) -> Remedy | None:
    """The remedy that the evidence is for, or None.

    Args:
        cause: The verdict.
        found: What the experiments have shown.
        sane: Whether an unscaled gradient norm is one to step on.
    """
    if cause is None or found.norm is None or sane(found.norm) is not True:
        return None
    if cause.code == 'NF101' and found.fits is not None:
        return Remedy('retried', found.fits)
    if cause.code in ('NF102', 'NF103'):
        for name, fp32 in (('part in fp32', found.part),
                           (f'{found.mode} in fp32', found.mode)):
            if fp32 is not None and name in found.proven:
                return Remedy('rescued_fp32_head', found.fits, (fp32, ))
    return None


def retry(window: Sequence[MicroStep], remedy: Remedy, host: Host,
          transaction: Transaction, carry: Callable[[Tensor], Tensor],
          sane: Sane) -> tuple[Any, float | None]:
    """Make the forwards and backwards of a window again.

    From the same batches, weights, buffers and random numbers. Nothing is
    taken back here.

    Args:
        window: The micro-steps.
        remedy: With what.
        host: Whose ``retries`` are there.
        transaction: Closed; it is left open.
        carry: Gives what to call ``backward`` on for a loss.
        sane: Whether an unscaled gradient norm is one to step on.

    Returns:
        What is logged of the last, and the norm of the gradients that are
        there now, unscaled; None where they are none to step on. An
        exception, as for memory, is an answer too.
    """
    retries: Any = host.retries
    logged = None
    try:
        with retries.at(remedy.scale, remedy.fp32):
            for index, micro in enumerate(window):
                forward: Any = micro.forward
                if index:
                    transaction.settle()
                forward.rng.restore()
                transaction.begin()
                batch = forward.batch.put_back()
                logged = retries.run(batch, len(window) - index - 1, carry)
            if retries.found_inf():
                return None, None
            norm = retries.norm()
    except Exception:
        # No step is worth a training, least of all the memory.
        return None, None
    return logged, norm if norm is not None and sane(norm) is True else None
