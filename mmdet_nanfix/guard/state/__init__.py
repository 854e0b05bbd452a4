"""Remember what a step may change, and restore it.

===============  ==========================================================
``transaction``  what the forwards of a window change, and the way back
``snapshot``     what hangs below a model at one moment
``backup``       copies of tensors
``rng``          random number generators; room on a device
``batch``        a batch as it was before a model touched it
``averages``     EMA, shadows and mean teachers that hooks keep
``buffers``      which buffers must stay finite
===============  ==========================================================
"""
from __future__ import annotations

from .averages import AveragedModels
from .batch import BatchSnapshot
from .rng import Rng, cuda_devices, has_room
from .snapshot import Snapshot

__all__ = [
    'AveragedModels', 'BatchSnapshot', 'Rng', 'Snapshot',
    'cuda_devices', 'has_room'
]
