"""Check settings and arguments of an optimizer wrapper, and sort them."""
from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from ...fp32 import MODES
from ...guard.rules import LossScaleSettings

__all__ = [
    'GUARDED_DEVICES', 'Settings', 'checked_dtype', 'device_of', 'is_off',
    'not_guarded', 'split_settings'
]

#: Types of the devices whose training is guarded.
GUARDED_DEVICES = ('cuda', 'cpu')

_OTHERS = ('max_consecutive', 'max_incidents', 'fp32', 'fp32_modules')
_DTYPES = ('float16', 'bfloat16', 'float32', 'float64')


def is_off() -> bool:
    """Whether ``MMDET_NANFIX=off`` is in the environment."""
    return os.environ.get('MMDET_NANFIX', '').lower() == 'off'


def checked_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """The autocast dtype; None is float16.

    Raises:
        TypeError: Neither a name nor a ``torch.dtype``.
        ValueError: Another dtype than autocast takes.
    """
    if dtype is None:
        return torch.float16
    name = dtype if isinstance(dtype, str) else str(dtype)[len('torch.'):]
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError('Expected argument `dtype` to be a str or a '
                        f'torch.dtype, but got {dtype!r}')
    if name not in _DTYPES:
        raise ValueError(f'Expected argument `dtype` to be one of {_DTYPES}, '
                         f'but got {dtype!r}')
    return getattr(torch, name)


@dataclasses.dataclass
class Settings:
    """Settings by the part that takes them.

    Attributes:
        scale: Of the loss scale.
        stop: Of the stop rule.
        fp32: Which regions run in fp32, of :data:`.MODES`.
        max_incidents: How many failed steps are looked into.
        fp32_modules: Paths of modules that run in fp32 as a whole.
    """

    scale: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop: dict[str, Any] = dataclasses.field(default_factory=dict)
    fp32: str | None = 'heads'
    max_incidents: int | None = 100
    fp32_modules: list[str] = dataclasses.field(default_factory=list)


def split_settings(nanfix: dict[str, Any] | None) -> Settings:
    """Settings as a config gives them, split and checked by name.

    Raises:
        TypeError: No dict, or a name that does not exist.
        ValueError: Regions that do not exist.
    """
    if nanfix is None:
        return Settings()
    if not isinstance(nanfix, dict):
        raise TypeError('Expected argument `nanfix` to be a dict of settings,'
                        f' but got {nanfix!r}')
    found = Settings()
    scales = LossScaleSettings.__dataclass_fields__
    for key, value in nanfix.items():
        if key == 'fp32':
            if value not in MODES:
                raise ValueError('Expected setting `fp32` to be one of '
                                 f'{MODES}, but got {value!r}')
            found.fp32 = value
        elif key == 'fp32_modules':
            found.fp32_modules = _names(key, value)
        elif key == 'max_incidents':
            found.max_incidents = _count(key, value)
        elif key == 'max_consecutive':
            found.stop[key] = value
        elif key in scales:
            found.scale[key] = value
        else:
            raise TypeError(
                f'`nanfix` has no setting {key!r}; accepted are '
                f'{", ".join(_OTHERS)}, {", ".join(scales)}')
    return found


def _names(name: str, value: Any) -> list[str]:
    """A list of names."""
    if not isinstance(value, (list, tuple)) or not all(
            isinstance(item, str) for item in value):
        raise TypeError(f'Expected setting `{name}` to be a list of str, but '
                        f'got {value!r}')
    return list(value)


def _count(name: str, value: Any) -> int | None:
    """A number of things, or None for no limit."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f'Expected setting `{name}` to be an int or None, '
                        f'but got {value!r}')
    if value < 0:
        raise ValueError(f'Expected setting `{name}` to be at least 0 or '
                         f'None, but got {value!r}')
    return value


def device_of(optimizer: Any) -> str:
    """Device type of what is optimized; ``cpu`` for nothing."""
    groups = getattr(optimizer, 'param_groups', [])
    return next((parameter.device.type for group in groups
                 for parameter in group['params']), 'cpu')


def not_guarded(device: str) -> str:
    """Say that devices of a type are not guarded."""
    return (f'devices of type {device!r} are not guarded: the optimizer '
            'wrapper behaves as the stock class')
