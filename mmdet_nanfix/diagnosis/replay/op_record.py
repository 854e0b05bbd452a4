"""Note operations that have made something non-finite, and where."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, Iterable, Tuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...guard.checks import is_finite
from ...torch_support import walk

__all__ = [
    'BadStorages', 'CallSite', 'OpRecord', 'OpSchema', 'bad_rows', 'describe',
    'function_of', 'is_beyond', 'is_floating'
]


@dataclasses.dataclass(frozen=True)
class CallSite:
    """One place in the code of a model.

    Attributes:
        source: ``file:line``, the innermost outside of torch; None where
            there is none.
        function: Name of the function of that line.
        file_module: Python module of that line.
        module: Path of the innermost module whose method runs; ``''`` is
            the model itself, None no module at all.
        in_loss: Whether losses, targets or costs are computed here, and not
            the forward of layers.
        level: Index of the feature level that a loop over levels is at.
        image: Index of the image that a loop over images is at.
    """

    source: str | None = None
    function: str | None = None
    file_module: str | None = None
    module: str | None = None
    in_loss: bool = False
    level: int | None = None
    image: int | None = None


@dataclasses.dataclass(eq=False)
class OpRecord:
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
    site: CallSite
    given: tuple[str, str] | None = None
    parents: list[OpRecord] = dataclasses.field(default_factory=list)
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


# They return memory as they find it.
_UNWRITTEN = frozenset({'empty', 'empty_like', 'empty_strided', 'new_empty',
                        'new_empty_strided', 'empty_permuted', 'resize_'})
# They write to running statistics, which their schemas do not say.
_SILENT = {name: (3, 4) for name in (
    'native_batch_norm', 'cudnn_batch_norm', 'miopen_batch_norm')}
# They write without looking at what was there.
_OVERWRITING = frozenset({'copy_', 'fill_', 'zero_', 'normal_', 'uniform_'})
# Their numbers become elements as they are.
_FILLING = frozenset({'fill', 'fill_', 'full', 'full_like', 'index_fill',
                      'index_fill_', 'masked_fill', 'masked_fill_',
                      'new_full', 'scalar_tensor', 'where',
                      'constant_pad_nd'})


@dataclasses.dataclass(frozen=True)
class OpSchema:
    """What the probe needs of an operation's schema.

    Attributes:
        name: Of the operation, without its overload.
        writes: Places and names of the arguments that it writes to.
        is_view: Whether its result shares the memory of an argument.
    """

    name: str
    writes: frozenset[Any]
    is_view: bool

    @staticmethod
    @functools.lru_cache(maxsize=None)
    def of(func: Any) -> OpSchema:
        """Read the schema of an overload, once."""
        schema, name = func._schema, func._overloadpacket.__name__
        writes: set[Any] = set(_SILENT.get(name, ()))
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and (
                    argument.alias_info.is_write):
                writes.add(argument.name if argument.kwarg_only else place)
        view = not writes and any(
            item.alias_info is not None for item in schema.returns)
        return OpSchema(name, frozenset(writes), view)

    @property
    def leaves_unwritten(self) -> bool:
        """Whether the result is memory as it was found."""
        return self.name in _UNWRITTEN

    @property
    def overwrites(self) -> bool:
        """Whether it writes without looking at what was there."""
        return self.name in _OVERWRITING

    @property
    def fills(self) -> bool:
        """Whether its numbers become elements as they are."""
        return self.name in _FILLING


# Of one storage, so many parts are told apart.
_MOST_PARTS = 256
#: Where in a storage something bad is, in bytes, and what made it so.
Span = Tuple[int, int, OpRecord]


def is_floating(value: Any) -> bool:
    """Tell if a value is a tensor that can hold something non-finite."""
    return ((type(value) is Tensor or isinstance(value, nn.Parameter))
            and (value.is_floating_point() or value.is_complex())
            and value.layout == torch.strided and value.numel() > 0
            and value.device.type != 'meta')


class BadStorages:
    """Remembers what made the contents of storages non-finite."""

    def __init__(self) -> None:
        # By address. A weak reference keeps an address from being used
        # again, not the memory.
        self._bad: dict[int, tuple[StorageWeakRef, list[Span]]] = {}

    def mark(self, tensor: Tensor, record: OpRecord) -> None:
        """Take in a bad tensor; what else is in its memory may be too."""
        begin, end = span_of(tensor)
        weak = StorageWeakRef(tensor.untyped_storage())
        _, known = self._bad.get(weak.cdata, (weak, []))
        others = [item for item in known
                  if item[0] < begin or item[1] > end][-_MOST_PARTS:]
        self._bad[weak.cdata] = (weak, [*others, (begin, end, record)])

    def clear(self, tensor: Tensor) -> None:
        """Forget all of the memory of a tensor."""
        self._bad.pop(tensor.untyped_storage()._cdata, None)

    def of(self, tensor: Tensor) -> list[OpRecord]:
        """Return what made a tensor non-finite; nothing where it is finite.

        Reads from the device where something bad is known of its memory.
        """
        if not is_floating(tensor):
            return []
        known = self._bad.get(tensor.untyped_storage()._cdata)
        if known is None or is_finite(tensor):
            return []
        begin, end = span_of(tensor)
        return [record for first, last, record in known[1]
                if first < end and last > begin]

    def origins(self, tensors: Iterable[Tensor]) -> list[OpRecord]:
        """Return the origins that reached any of the tensors, in order.

        Infinities that were asked for are among them only where there is
        nothing else.
        """
        made = walk([record for tensor in tensors
                     for record in self.of(tensor)],
                    lambda record: record.parents)
        ordered = sorted(
            (record for record in made if record.is_origin
             and not (record.meant and record.parents)),
            key=lambda record: record.index)
        return [record for record in ordered if not record.meant] or ordered


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


def function_of(site: CallSite) -> str:
    """Name what is not dispatched: the function that called it."""
    return f'{site.file_module or "?"}.{site.function}'


def is_beyond(value: float, results: Iterable[Tensor]) -> bool:
    """Tell if a finite number is an infinity in the dtype of a result."""
    return any(abs(value) > torch.finfo(result.dtype).max
               for result in results)


def describe(tensor: Tensor) -> dict[str, Any]:
    """Shape, dtype, the largest finite magnitude, counts of NaN, inf and -inf.

    Reads from the device.
    """
    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    finite = value[torch.isfinite(value)]
    return {
        'shape': list(value.shape),
        'dtype': str(value.dtype)[len('torch.'):],
        'amax': float(finite.abs().max()) if finite.numel() else None,
        'nan': int(value.isnan().sum()),
        'inf': int(value.isposinf().sum()),
        '-inf': int(value.isneginf().sum()),
    }
