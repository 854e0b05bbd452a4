"""Cast the arguments of an operation as autocast does, and weights once."""
from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from ..torch_support import map_tensors, tensors

__all__ = [
    'CastCache', 'as_one', 'computing', 'dtypes_of', 'eligible',
    'map_eligible'
]


class CastCache:
    """Keep half copies of weights, one a weight and autocast region.

    A weight that is used several times in a region, as in a head shared by
    feature levels, is rounded once. Its gradients meet at that copy and are
    summed in half: the sum can overflow where no part does. CUDA's cache
    holds leaves that need a gradient, and nothing else; a copy made without
    gradients would cut the weight off from a later use with them.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Forget all copies; autocast does so at the end of a region."""
        self._copies.clear()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor in half; float64 is not for this."""
        if tensor.dtype == dtype:
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf
                and tensor.dtype == torch.float32 and not tensor._is_view()
                and torch.is_autocast_cache_enabled()
                and torch.is_grad_enabled()):
            return tensor.to(dtype)
        # By its address, which is not given away while the tensor is kept: a
        # kernel gets another Python object in each call (seen in 2.1.2).
        _, copy = self._copies.get(tensor._cdata, (None, None))
        if copy is None or copy.dtype != dtype:
            copy = tensor.to(dtype)
            self._copies[tensor._cdata] = (tensor, copy)
        return copy


def eligible(value: Any) -> bool:
    """Tell if autocast casts it: floating, on a CPU, not fp64."""
    return (isinstance(value, Tensor) and value.is_floating_point()
            and value.dtype != torch.float64 and value.device.type == 'cpu')


def map_eligible(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to every eligible tensor in containers."""
    return map_tensors(lambda tensor: function(tensor) if eligible(
        tensor) else tensor, value)


def dtypes_of(*values: Any) -> set[torch.dtype]:
    """Return the dtypes of the eligible tensors in containers."""
    return {tensor.dtype for tensor in tensors(values) if eligible(tensor)}


class _Computing(threading.local):
    """Keep the half operation that this thread computes in several steps."""

    name: str | None = None
    count = 0


_COMPUTING = _Computing()


def computing() -> tuple[str | None, int]:
    """Return the name of the half operation in progress, or None.

    With it a number that tells one call from the next.

    What it is made of here (products in fp32, a rounding) is one operation
    on a GPU; the rounding of an fp32 input in front of it is another.
    """
    return _COMPUTING.name, _COMPUTING.count


@contextlib.contextmanager
def as_one(name: str) -> Iterator[None]:
    """Enter a region whose operations are one on a GPU."""
    outer, _COMPUTING.name = _COMPUTING.name, name
    _COMPUTING.count += 1
    try:
        yield
    finally:
        _COMPUTING.name = outer
