"""Let torch resume from checkpoints that MMEngine has written."""
from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

__all__ = ['allow_resume']

# From torch 2.6 on. 2.4 and 2.5 have ``add_safe_globals`` too, but there a
# pair of a function and a name breaks every later load of weights only.
_READS_WEIGHTS_ONLY = tuple(
    int(part) for part in torch.__version__.split('.')[:2]) >= (2, 6)


def allow_resume() -> None:
    """Let ``torch.load`` read what MMEngine's checkpoints hold.

    From torch 2.6 on it reads weights only unless told otherwise, and
    MMEngine 0.10.7 does not tell it: resuming fails at the message hub's
    histories. These are numbers in numpy arrays, and names of statistics;
    nothing that could run code is allowed.
    """
    if not _READS_WEIGHTS_ONLY:
        return
    kinds = {type(np.dtype(name)) for name in (
        'float64', 'float32', 'int64', 'int32', 'bool')}
    rebuild = np.empty(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    torch.serialization.add_safe_globals([
        HistoryBuffer, np.ndarray, np.dtype, rebuild, scalar, *kinds,
        (_statistic, 'builtins.getattr')])


def _statistic(history: Any, name: str) -> Any:
    """``getattr`` for a statistic of histories, and for nothing else."""
    known = {'min', 'max', 'current', 'mean',
             *HistoryBuffer._statistics_methods}
    if history is not HistoryBuffer or name not in known:
        raise pickle.UnpicklingError(
            f'a checkpoint asks for {name!r} of {history!r}, which is no '
            'statistic of a history')
    return getattr(history, name)
