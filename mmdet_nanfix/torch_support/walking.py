"""Walk through graphs of objects, and through the tensors in containers.

Containers are lists, tuples, dicts and, unlike in ``torch.utils._pytree``,
classes below these, which hosts use for configs and results.
"""
from __future__ import annotations

from collections import deque
from typing import Any, Callable, Iterable, Iterator, TypeVar

from torch import Tensor

__all__ = ['map_tensors', 'tensors', 'walk']

_Object = TypeVar('_Object')


def walk(roots: Iterable[_Object],
         below: Callable[[_Object], Iterable[_Object]],
         nearest_first: bool = False) -> Iterator[_Object]:
    """Yield objects and whatever hangs below them, each object once.

    Args:
        roots: Where to begin.
        below: Returns what hangs right below an object; called when the walk
            goes on.
        nearest_first: Go level by level, not into the depth.
    """
    # The objects themselves, so that none of their ids is used again.
    seen: dict[int, _Object] = {}
    waiting = deque(roots)
    while waiting:
        item = waiting.popleft() if nearest_first else waiting.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            yield item
            waiting.extend(below(item))


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
