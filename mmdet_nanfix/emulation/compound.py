"""Tell which half operation is being computed in several steps."""
from __future__ import annotations

import contextlib
import threading
from typing import Iterator

__all__ = ['as_one', 'computing']


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
