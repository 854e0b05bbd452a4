"""What is noted of an operation that has made something non-finite."""
from __future__ import annotations

import dataclasses
from typing import Any, Tuple

import torch
from torch import Tensor

from .sites import Site

__all__ = ['Record', 'bad_rows', 'module_of', 'span_of']


@dataclasses.dataclass(eq=False)
class Record:
    """One operation with a non-finite result, or something given that way.

    Attributes:
        index: Count of the operations before it; the same in each replay.
        op: Its name.
        site: Where it was called from; in a backward, where the forward
            operation was whose gradient this is.
        given: What it was, where it was there before: ``input``,
            ``annotation``, ``weight`` or ``buffer``, and its name.
        parents: What its non-finite inputs come from.
        meant: An infinity that was asked for, or follows from one.
        backward: Whether it ran in a backward.
        inputs: Of :func:`describe`, of an origin.
        outputs: Likewise.
        seen: Whether it ran under the probe; else ``index`` is of what
            used its result.
        rows: Indices along the first dimension of the output that are not
            finite, of an origin; and that dimension.
    """

    index: int
    op: str
    site: Site
    given: tuple[str, str] | None = None
    parents: list[Record] = dataclasses.field(default_factory=list)
    meant: bool = False
    backward: bool = False
    inputs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    outputs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    seen: bool = True
    rows: tuple[list[int], int] = dataclasses.field(
        default_factory=lambda: ([], 0))

    @property
    def is_origin(self) -> bool:
        """Whether nothing that it was given was bad, but on purpose."""
        return all(parent.meant for parent in self.parents)


#: Where in a storage something bad is, in bytes, and what made it so.
Span = Tuple[int, int, Record]


def span_of(tensor: Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    reach = sum((length - 1) * stride for length, stride in zip(
        tensor.shape, tensor.stride()))
    return begin, begin + (reach + 1) * size


def bad_rows(tensor: Tensor) -> tuple[list[int], int]:
    """Rows of a tensor that are not finite, and the number of rows."""
    if tensor.dim() < 2:
        return [], 0
    rows = (~torch.isfinite(tensor.detach())).flatten(1).any(1)
    return rows.nonzero().flatten().tolist(), len(rows)


def module_of(site: Site) -> str:
    """A name for what is not dispatched: of the function that called it."""
    path = (site.source or '?').rpartition(':')[0]
    name = path.replace('\\', '/').rpartition('site-packages/')[2]
    name = name[:-len('.py')] if name.endswith('.py') else name
    return f'{name.replace("/", ".").strip(".")}.{site.function}'
