"""Convert an optimizer wrapper into a guarded one, where it stands."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from mmengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIM_WRAPPERS

from .optim_wrapper import GuardedOptimWrapper
from .reporter import warn
from .settings import GUARDED_DEVICES, device_of, not_guarded

__all__ = ['guard_existing_wrapper']


def guard_existing_wrapper(wrapper: Any, settings: dict[str, Any]) -> None:
    """Turn an optimizer wrapper into a guarded one, where it stands.

    Schedulers hold the wrapper itself, so that a new one would leave them
    behind. A wrapper that is guarded already takes the settings.

    Args:
        wrapper: Of a runner.
        settings: As ``nanfix`` of the wrapper; they win over its own.

    On a device that is not guarded it stays as it is, and one line says so.

    Raises:
        TypeError: A wrapper that cannot be guarded.
    """
    kind = type(wrapper)
    if isinstance(wrapper, GuardedOptimWrapper):
        if settings:
            wrapper.guard_with(settings)
        return
    device = device_of(getattr(wrapper, 'optimizer', None))
    if device not in GUARDED_DEVICES:
        if not getattr(kind, 'says_so', False):
            warn(not_guarded(device))
        return
    if kind is AmpOptimWrapper or getattr(kind, 'is_stock', False):
        scaler = wrapper.loss_scaler
        wrapper._loss_scale = {
            'init_scale': float(scaler.get_scale()),
            'growth_factor': scaler.get_growth_factor(),
            'backoff_factor': scaler.get_backoff_factor(),
            'growth_interval': scaler.get_growth_interval(),
        } if scaler.is_enabled() else {'enabled': False}
        wrapper._use_fsdp = type(scaler).__name__ == 'ShardedGradScaler'
        wrapper._scale_update_param = None
        wrapper.cast_dtype = wrapper.cast_dtype or torch.float16
        wrapper.__class__ = OPTIM_WRAPPERS.get('NanSafeAmpOptimWrapper')
    elif kind is OptimWrapper:
        wrapper.__class__ = OPTIM_WRAPPERS.get('NanSafeOptimWrapper')
    else:
        what = 'several optimizers' if isinstance(
            wrapper, OptimWrapperDict) else kind.__name__
        raise TypeError(
            f'NanGuardHook cannot guard {what}: it takes OptimWrapper, '
            'AmpOptimWrapper and the NanSafe wrappers; remove it from the '
            'hooks, or set optim_wrapper.type to one of them')
    wrapper.guard_with(settings)
    if 'step' in wrapper.__dict__:
        # A scheduler has bound the step of the class before.
        wrapper.step = _counted(wrapper)


def _counted(wrapper: Any) -> Any:
    """The step with the count that MMEngine's schedulers keep."""
    # A cycle would keep the optimizer alive, as it would in torch.
    alive = weakref.ref(wrapper)

    def step(**kwargs: Any) -> None:
        instance: Any = alive()
        instance._global_step += 1
        type(instance).step(instance, **kwargs)

    step._with_counter = True  # type: ignore[attr-defined]
    return step
