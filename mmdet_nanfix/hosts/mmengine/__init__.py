"""Plug into MMEngine, with MMDetection 3.x and its siblings.

======================  ===================================================
``optim_wrapper``       what guarded optimizer wrappers have in common
``amp_optim_wrapper``   ``AmpOptimWrapper``, guarded
``full_optim_wrapper``  ``OptimWrapper``, guarded
``trainer``             the ``Trainer`` and the ``Ranks`` of the guard: steps
                        of a wrapper, run again; the processes
``hooks``               around other hooks: EMA, losses, checkpoints
``convert``             an optimizer wrapper, made a guarded one
``reporter``            hands incidents to log, console and visualizer
``settings``            settings and arguments, checked
``losses``              MMDetection's losses in fp32, under their own names
``resume``              checkpoints of MMEngine, read by torch
``model_kinds``         models that are guarded otherwise
======================  ===================================================
"""
from __future__ import annotations

from .amp_optim_wrapper import NanSafeAmpOptimWrapper, StockAmpOptimWrapper
from .full_optim_wrapper import NanSafeOptimWrapper
from .hooks import NanfixRuntimeInfoHook, NanGuardHook
from .losses import fp32_class, fp32_losses, register_losses
from .resume import allow_resume
from .settings import is_off

__all__ = [
    'NanGuardHook', 'NanSafeAmpOptimWrapper', 'NanSafeOptimWrapper',
    'fp32_class', 'fp32_losses', 'register', 'register_losses'
]


def register(has_mmdet: bool) -> None:
    """Register names, and replace those of MMDetection.

    Args:
        has_mmdet: Whether MMDetection is installed.
    """
    if has_mmdet:
        _shadow_stock_names(guarded=not is_off())
        register_losses()
    if not is_off():
        allow_resume()


def _shadow_stock_names(guarded: bool = True) -> None:
    """Make mmdet's scope resolve two of MMEngine's names to ours.

    ``AmpOptimWrapper`` and ``RuntimeInfoHook``.

    Only in mmdet's own registry: MMEngine's, and so every other scope,
    keeps the stock class.

    Args:
        guarded: False keeps the stock behaviour.

    Raises:
        ImportError: mmdet is not installed.
    """
    from mmdet.registry import HOOKS as MMDET_HOOKS
    from mmdet.registry import OPTIM_WRAPPERS as MMDET_OPTIM_WRAPPERS

    MMDET_OPTIM_WRAPPERS.register_module(
        name='AmpOptimWrapper', force=True,
        module=NanSafeAmpOptimWrapper if guarded else StockAmpOptimWrapper)
    if guarded:
        MMDET_HOOKS.register_module(
            name='RuntimeInfoHook', force=True, module=NanfixRuntimeInfoHook)
