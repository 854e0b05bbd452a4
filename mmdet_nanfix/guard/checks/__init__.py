"""Check losses, gradients and buffers without slowing a healthy step.

============  =============================================================
``finite``    which tensors are not finite; flags and norms
``anchor``    the state of the losses, folded into one gradient
``sanitize``  functions that raise for non-finite numbers, made rank-safe
============  =============================================================
"""
from __future__ import annotations

from .anchor import leaves_of, loss_terms, nodes_of
from .finite import bad_tensors, can_be_checked, is_finite, norm_of
from .sanitize import install_sanitizers, sanitizing

__all__ = [
    'bad_tensors', 'can_be_checked', 'install_sanitizers', 'is_finite',
    'leaves_of', 'loss_terms', 'nodes_of', 'norm_of', 'sanitizing'
]
