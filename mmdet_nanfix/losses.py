"""Find the ``Fp32*`` losses, whose pickled classes name this module."""
from __future__ import annotations

from torch import nn

from .hosts.mmengine import fp32_class, fp32_losses, register_losses

__all__ = ['fp32_class', 'register_losses']


def __getattr__(name: str) -> type[nn.Module]:
    if name in fp32_losses:
        return fp32_losses[name]
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
