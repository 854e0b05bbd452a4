"""Cast half tensors to fp32, and leave autocast.

What a loss or a matching cost computes in half is what most often becomes
non-finite: ``log``, ``exp`` and squares leave half's range, an eps below 6e-8
is 0, an area above 65504 is inf. :func:`in_fp32` gives a function fp32 copies
of all its floating inputs, and autocast no say in it.
"""
from __future__ import annotations

import contextlib
import copy
import sys
import types
from typing import Any, Callable, Container, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..torch_support import HALVES, tensors

__all__ = [
    'WideSigmoid', 'in_fp32', 'widened', 'without_autocast'
]

# Batches hold samples, these hold instances, these hold boxes, these tensors.
_DEPTH = 8
_ATOMS = (str, bytes, int, float, type(None), type, nn.Module, torch.dtype,
          torch.device, torch.Size)
_LONG = 1000


def widened(value: Any) -> Any:
    """Return the same value with half tensors in fp32, in the same graph.

    A tensor that comes twice is cast once, and stays one.

    Args:
        value: Tensors in lists, tuples, dicts and in attributes of plain
            objects (MMEngine's data elements, boxes, sampling results). What
            holds no half tensor stays the object that it is; what does is
            copied as far down as needed. Lists of more than a thousand
            values that are no tensors are not looked into.
    """
    return _widened(value, {}, _DEPTH)


def _widened(value: Any, known: dict[int, Any], depth: int) -> Any:
    if isinstance(value, Tensor):
        if value.dtype not in HALVES:
            return value
    elif depth == 0 or isinstance(value, _ATOMS):
        return value
    if id(value) not in known:
        # Beside the value itself, so that its id is not given away.
        known[id(value)] = value, value
        known[id(value)] = value, _wide_copy(value, known, depth)
    return known[id(value)][1]


def _wide_copy(value: Any, known: dict[int, Any], depth: int) -> Any:
    out: Any
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, dict):
        changed = _changed(dict(dict.items(value)), known, depth)
        out = copy.copy(value) if changed else value
        for key, wide in changed.items():
            out[key] = wide
        return out
    if isinstance(value, (list, tuple)):
        if len(value) > _LONG and not isinstance(value[0], Tensor):
            return value
        wide = [_widened(item, known, depth - 1) for item in value]
        if all(new is old for new, old in zip(wide, value)):
            return value
        if isinstance(value, list):
            out = copy.copy(value)
            out[:] = wide
            return out
        return type(value)(*wide) if hasattr(value, '_fields') else (
            type(value)(wide))
    if not hasattr(value, '__dict__') or callable(value):
        return value
    changed = _changed(dict(vars(value)), known, depth)
    if not changed:
        return value
    out = copy.copy(value)
    for own in ('_data_fields', '_metainfo_fields'):
        # A data element's books are its own.
        if isinstance(vars(out).get(own), set):
            vars(out)[own] = set(vars(out)[own])
    vars(out).update(changed)
    return out


def _changed(items: dict[Any, Any], known: dict[int, Any],
             depth: int) -> dict[Any, Any]:
    """Return what is another object in fp32, by key or attribute."""
    wide = {key: _widened(item, known, depth - 1)
            for key, item in items.items()}
    return {key: value for key, value in wide.items()
            if value is not items[key]}


@contextlib.contextmanager
def without_autocast(*devices: str) -> Iterator[None]:
    """Enter a region with autocast off.

    Args:
        *devices: Device types, such as ``cuda``.
    """
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def in_fp32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in fp32; no device sync.

    Args:
        function: What to call.
        *args: Its arguments; every half tensor in them, at any depth, is
            passed as an fp32 copy.
        **kwargs: Likewise.
    """
    devices = {tensor.device.type for tensor in tensors((args, kwargs))}
    with without_autocast(*sorted(devices)):
        args, kwargs = widened((args, kwargs))
        return function(*args, **kwargs)


class WideSigmoid(TorchFunctionMode):
    """Compute ``sigmoid`` of some code in fp32, like softmax, for a region.

    Autocast leaves it half. There a logit of 8.4 gives 1, so that the log of
    what is missing to 1 is lost, and with it the gradient.

    Args:
        codes: Whose own calls are meant, not what these call in turn: a part
            that is checkpointed runs again alone, and has to compute the
            same then.
    """

    def __init__(self, codes: Container[types.CodeType]) -> None:
        super().__init__()
        self._codes = codes

    def __torch_function__(self, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        if func in _SIGMOIDS and not (kwargs and 'out' in kwargs):
            caller: Any = sys._getframe(1)
            if caller.f_code is functional.sigmoid.__code__:
                caller = caller.f_back
            if caller.f_code in self._codes:
                args, kwargs = widened((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


_SIGMOIDS = frozenset({torch.sigmoid, Tensor.sigmoid, torch.special.expit})
