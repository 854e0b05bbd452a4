"""Select what a failed step is made again with."""
from __future__ import annotations

from typing import Callable

from ...guard import Remedy
from ...incidents import Cause
from ..findings import Counterfactual, Findings

__all__ = ['select_remedy']


def select_remedy(cause: Cause | None, found: Findings,
                  sane: Callable[[float], bool | None]) -> Remedy | None:
    """Select the remedy that the evidence is for, or None.

    Args:
        cause: The verdict.
        found: What the experiments have shown.
        sane: Tells if an unscaled gradient norm is one to step on.
    """
    if cause is None or found.norm is None or sane(found.norm) is not True:
        return None
    if cause.code == 'NF101' and found.fits is not None:
        return Remedy('retried', found.fits)
    if cause.code in ('NF102', 'NF103'):
        modes = [(Counterfactual.of_mode(found.mode), found.mode)] if (
            found.mode) else []
        for name, fp32 in ((Counterfactual.PART_FP32, found.part), *modes):
            if fp32 is not None and name in found.proven:
                return Remedy('rescued_fp32_head', found.fits, (fp32, ))
    return None
