"""Give several packages what they need of torch, and not every torch has.

=================  ========================================================
``features``       what this version of torch can do, and stand-ins for
                   functions that older versions lack
``grad_scaler``    the gradient scaler for a device, on any version
``patching``       replace attributes of torch and of the hosts, list what
                   is replaced, and put it back
``walking``        walk through objects, and through tensors in containers
=================  ========================================================
"""
from __future__ import annotations

from .features import (
    AUTOCAST_BY_DEVICE,
    HALVES,
    HAS_EAGER_STANCE,
    HAS_SEQUENCE_NR,
    foreach_copy_,
    not_compiled,
    tree_leaves,
)
from .grad_scaler import scaler_for
from .patching import Patches
from .walking import map_tensors, tensors, walk

__all__ = [
    'AUTOCAST_BY_DEVICE', 'HALVES', 'HAS_EAGER_STANCE',
    'HAS_SEQUENCE_NR', 'Patches', 'foreach_copy_', 'map_tensors',
    'not_compiled', 'scaler_for', 'tensors', 'tree_leaves', 'walk'
]
