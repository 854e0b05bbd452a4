"""Regions of full precision inside of autocast.

What a loss or a matching cost computes in half is what most often becomes
non-finite: ``log``, ``exp`` and squares leave half's range, an eps below 6e-8
is 0, an area above 65504 is inf. :func:`in_fp32` gives a function fp32 copies
of all its floating inputs, and autocast no say in it.
"""
import contextlib
from typing import Any, Callable, Iterator, Set

import torch
from torch import Tensor

__all__ = ['in_fp32', 'widened', 'without_autocast']

_HALVES = (torch.float16, torch.bfloat16)


def widened(value: Any) -> Any:
    """The same value with half tensors in fp32; autograd goes through.

    Args:
        value: Tensors in lists, tuples and dicts of any depth. fp32, fp64,
            integers and everything else stay the objects they are.
    """
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    if isinstance(value, dict):
        return type(value)({key: widened(item)
                            for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, '_fields'):
        return type(value)(*map(widened, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(widened, value))
    return value


def _devices(value: Any) -> Set[str]:
    if isinstance(value, Tensor):
        return {value.device.type}
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return set().union(*map(_devices, value))
    return set()


@contextlib.contextmanager
def without_autocast(*devices: str) -> Iterator[None]:
    """Region with autocast off.

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
    with without_autocast(*sorted(_devices((args, kwargs)))):
        return function(*widened(args), **widened(kwargs))
