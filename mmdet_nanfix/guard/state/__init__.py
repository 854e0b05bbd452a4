"""Remember what a step may change, and restore it.

===============  ==========================================================
``transaction``  what the forwards of a window change, and the way back:
                 copies of tensors
``snapshot``     what hangs below a model at one moment
``tree``         such snapshots at every step: reads what can have changed,
                 and looks at the whole model when something new is there
``batch``        what a forward begins with: a batch as it was, generators
                 of random numbers
``averages``     EMA, shadows and mean teachers that hooks keep
``buffers``      which buffers must stay finite
===============  ==========================================================
"""
from __future__ import annotations

from .averages import AveragedModels
from .batch import BatchSnapshot, Rng, cuda_devices, has_room
from .snapshot import Snapshot

__all__ = [
    'AveragedModels', 'BatchSnapshot', 'Rng', 'Snapshot',
    'cuda_devices', 'has_room'
]
