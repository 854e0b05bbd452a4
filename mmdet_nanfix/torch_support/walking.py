"""Walk through the tensors in lists, tuples and dicts.

Unlike ``torch.utils._pytree`` also through classes below these, which hosts
use for configs and results.
"""
from __future__ import annotations

from typing import Any, Callable, Iterator

from torch import Tensor

__all__ = ['map_tensors', 'tensors']


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers of any depth, in their order.

    Args:
        value: A tensor, a list, tuple or dict, or anything else, which is
            passed over.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the same containers with another value for each tensor.

    Args:
        function: Called with each tensor.
        value: As for :func:`tensors`; what is no tensor stays what it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, '_fields') else (
            type(value)(items))
    if isinstance(value, dict):
        return type(value)((key, map_tensors(function, item))
                           for key, item in value.items())
    return value
