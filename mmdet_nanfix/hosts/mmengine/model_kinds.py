"""Tell kinds of models that are guarded otherwise than most."""
from __future__ import annotations

from torch import nn

from ...fp32 import names_in

__all__ = ['has_compiled_parts', 'is_sharded', 'segfaults']


def _holds(model: nn.Module, *names: str) -> bool:
    """Whether a module of a model is of a class, or below one, so named."""
    return any(base.__name__ in names for module in model.modules()
               for base in type(module).__mro__)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP holds the parameters."""
    return _holds(model, 'FullyShardedDataParallel')


def has_compiled_parts(model: nn.Module) -> bool:
    """Tell if ``torch.compile`` was called for a module of a model."""
    return _holds(model, 'OptimizedModule')


def segfaults(model: nn.Module) -> bool:
    """Whether a backward of NaN ends the process.

    mmcv's deformable convolutions on a CPU index with what they sample at.
    Known by the function that a layer calls: SAConv2d is none of them.
    """
    calls = {'deform_conv2d', 'modulated_deform_conv2d'}
    return any(calls & names_in(kind, 'forward')
               for kind in set(map(type, model.modules())))
