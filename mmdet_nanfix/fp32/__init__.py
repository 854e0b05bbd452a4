"""Compute in full precision inside of autocast.

=================  ========================================================
``control``        the one way in: what runs in fp32 right now
``regions``        says which methods of heads, losses and assigners run so
``wrapping``       how these are wrapped, and what is in force
``modules``        whole modules: a head, a neck, a stage
``introspect``     reads off a model's code what computes losses in it
``cast``           half tensors in any nesting, as fp32 copies
``score_losses``   losses and matching costs of scores, finite in fp32
``box_losses``     losses of boxes, finite in fp32
=================  ========================================================
"""
from __future__ import annotations

from .cast import in_fp32
from .control import PrecisionControl
from .introspect import loss_modules, names_in
from .score_losses import finite_forward
from .wrapping import MARK, MODES

__all__ = [
    'MARK', 'MODES', 'PrecisionControl', 'finite_forward', 'in_fp32',
    'loss_modules', 'names_in'
]
