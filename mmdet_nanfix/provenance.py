"""Where non-finite numbers come from: a replay under a probe.

:class:`Provenance` sees each operation of a forward and of its backward. One
whose inputs are finite and whose output is not is an *origin*; one that is
given something non-finite passes it on. Which origins count is told by going
back from what must be finite (a loss, gradients, buffers): an infinity that
softmax absorbs, or that nothing uses, is never met on that way.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from types import ModuleType
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)

from .emulation import computing
from .finite import describe, is_finite
from .origins import Record, Span, bad_rows, module_of, span_of
from .sites import Site, Sites
from .torch_support import HAS_SEQUENCE_NR, tree_leaves

__all__ = ['Provenance']

# They return memory as they find it.
_UNWRITTEN = frozenset({'empty', 'empty_like', 'empty_strided', 'new_empty',
                        'new_empty_strided', 'empty_permuted', 'resize_'})
# They write to running statistics, which their schemas do not say.
_SILENT = {name: (3, 4) for name in (
    'native_batch_norm', 'cudnn_batch_norm', 'miopen_batch_norm')}
# Of one storage, so many parts are told apart.
_MOST_PARTS = 256
# They write without looking at what was there.
_OVERWRITING = frozenset({'copy_', 'fill_', 'zero_', 'normal_', 'uniform_'})
# Their numbers become elements as they are.
_FILLING = frozenset({'fill', 'fill_', 'full', 'full_like', 'index_fill',
                      'index_fill_', 'masked_fill', 'masked_fill_',
                      'new_full', 'scalar_tensor', 'where',
                      'constant_pad_nd'})


def _is_floating(value: Any) -> bool:
    return ((type(value) is Tensor or isinstance(value, nn.Parameter))
            and (value.is_floating_point() or value.is_complex())
            and value.layout == torch.strided and value.numel() > 0
            and value.device.type != 'meta')


@dataclasses.dataclass(frozen=True)
class _Schema:
    """What is needed of an operation's schema."""

    name: str
    writes: frozenset[Any]
    is_view: bool


@functools.lru_cache(maxsize=None)
def _schema(func: Any) -> _Schema:
    schema = func._schema
    writes: set[Any] = set(_SILENT.get(func._overloadpacket.__name__, ()))
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.add(argument.name if argument.kwarg_only else place)
    view = not writes and any(
        item.alias_info is not None for item in schema.returns)
    return _Schema(func._overloadpacket.__name__, frozenset(writes), view)


class Provenance(TorchDispatchMode):
    """Follows non-finite numbers through a forward and a backward.

    For replays: each operation reads from the device once.

    Args:
        sites: Finds places in the code.
        given: What is non-finite from the start: name and tensor by kind.
        meant: Buffers that hold infinities on purpose.
        mended: Name and source of origins whose result is set to 0, all of
            it.

    Attributes:
        index: Operations so far.
        seen: Operations so far that made something non-finite of what was
            not, on purpose or not, whatever became of it.
        running: The operation that is under way, or that raised.
    """

    def __init__(self, sites: Sites,
                 given: Iterable[tuple[str, str, Tensor]] = (),
                 meant: Iterable[Tensor] = (),
                 mended: Iterable[tuple[str, str | None]] = ()) -> None:
        super().__init__()
        self.index = 0
        self.seen = 0
        self.running: str | None = None
        self._sites = sites
        self._mended = frozenset(mended)
        # Storages that hold something bad, by address. A weak reference
        # keeps an address from being used again, not the memory.
        self._bad: dict[int, tuple[StorageWeakRef, list[Span]]] = {}
        self._made: dict[int, tuple[StorageWeakRef, str, Site]] = {}
        # Where the forward operation of each autograd node was called from.
        self._nodes: dict[Any, tuple[str, Site]] = {}
        # The half operation that is being computed, and its inputs.
        self._scope: tuple[int, list[Tensor]] = (0, [])
        for kind, name, tensor in given:
            self._mark(tensor, Record(-1, kind, Site(), (kind, name),
                                      outputs=[describe(tensor)]))
        for tensor in meant:
            self._mark(tensor, Record(-1, 'buffer', Site(), meant=True))

    def _mark(self, tensor: Tensor, record: Record) -> None:
        """A tensor is bad, and what else is in its memory may be too."""
        begin, end = span_of(tensor)
        weak = StorageWeakRef(tensor.untyped_storage())
        _, known = self._bad.get(weak.cdata, (weak, []))
        others = [item for item in known
                  if item[0] < begin or item[1] > end][-_MOST_PARTS:]
        self._bad[weak.cdata] = (weak, [*others, (begin, end, record)])

    def of(self, tensor: Tensor) -> list[Record]:
        """What made a tensor non-finite; nothing where it is finite."""
        if not _is_floating(tensor):
            return []
        known = self._bad.get(tensor.untyped_storage()._cdata)
        if known is None or is_finite(tensor):
            return []
        begin, end = span_of(tensor)
        return [record for first, last, record in known[1]
                if first < end and last > begin]

    def origins(self, tensors: Iterable[Tensor]) -> list[Record]:
        """The origins that reached any of the tensors, in their order.

        Infinities that were asked for are among them only where there is
        nothing else.
        """
        found: dict[int, Record] = {}
        seen: set[int] = set()
        waiting = [record for tensor in tensors
                   for record in self.of(tensor)]
        while waiting:
            record = waiting.pop()
            if id(record) in seen:
                continue
            seen.add(id(record))
            if record.is_origin and not (record.meant and record.parents):
                found[id(record)] = record
            waiting.extend(record.parents)
        ordered = sorted(found.values(), key=lambda record: record.index)
        return [record for record in ordered if not record.meant] or ordered

    def made_at(self, node: Any) -> Site | None:
        """Where the operation of an autograd node was called from."""
        found = self._nodes.get(_key_of(node))
        return found[1] if found is not None else None

    @contextlib.contextmanager
    def following(self, modules: Iterable[ModuleType]) -> Iterator[None]:
        """Region in which operations are followed.

        Args:
            modules: Of compiled functions that torch does not dispatch.
        """
        originals = []
        for module in modules:
            for name, function in list(vars(module).items()):
                if callable(function) and not name.startswith('_') and (
                        not isinstance(function, type)):
                    originals.append((module, name, function))
                    setattr(module, name, self._through(name, function))
        try:
            with self:
                yield
        finally:
            for module, name, function in originals:
                setattr(module, name, function)

    def _through(self, name: str, function: Callable[..., Any]
                 ) -> Callable[..., Any]:

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.foreign(name, function, args, kwargs)

        return call

    def foreign(self, name: str, function: Callable[..., Any],
                args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a compiled function that torch does not dispatch.

        Args:
            name: What to call it.
            function: It; tensors among its arguments may be written to.
            args: Its arguments.
            kwargs: Likewise.
        """
        tensors = [value for value in tree_leaves((args, dict(kwargs)))
                   if _is_floating(value)]
        with _disable_current_modes():
            bad = [tensor for tensor in tensors if not is_finite(tensor)]
        start = self.index
        out = function(*args, **kwargs)
        with _disable_current_modes():
            had = set(map(id, bad))
            results = [value for value in (*tensors, *tree_leaves(out))
                       if _is_floating(value) and id(value) not in had
                       and not is_finite(value)]
            self._finish(results, name)
            self.index += 1
            inside = [record for result in results
                      for record in self.of(result)
                      if record.index >= start]
            for record in inside:
                # On a GPU this is one operation.
                record.op = name
            place = name, self._sites.here()
            if results and not bad and self._mend(place, results):
                return out
            if results and not inside:
                self._note(place, results, self._parents(bad, place[1]),
                           tensors)
        return out

    def __torch_dispatch__(self, func: Any, types: Any,
                           args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        schema = _schema(func)
        # Within a backward a checkpointed forward runs with gradients on.
        node = None if torch.is_grad_enabled() else (
            torch._C._current_autograd_node())
        places = [(place, value) for place, value in (
            *enumerate(args), *kwargs.items()) if place in schema.writes]
        written = [value for value in tree_leaves([
            value for _, value in places]) if _is_floating(value)]
        # What is given by name is filled (``out=``), the rest is changed.
        changed = [] if schema.name in _OVERWRITING else tree_leaves([
            value for place, value in places if isinstance(place, int)])
        held = [record for value in changed for record in self.of(value)]
        self.running = schema.name
        if not HAS_SEQUENCE_NR and node is None:
            self._see_inputs(tree_leaves((args, kwargs)))
        out = func(*args, **kwargs)
        self.running = None
        self.index += 1
        if node is None:
            if HAS_SEQUENCE_NR:
                self._see_node(schema.name)
            self._see_scope(schema.name, args)
        if schema.is_view and schema.name != 'lift_fresh':
            return out
        results = list({id(value): value for value in (
            *tree_leaves(out), *written) if _is_floating(value)}.values())
        if schema.name in _UNWRITTEN:
            for value in results:
                self._clear(value)
            return out
        spoiled = self._finish(results, schema.name)
        if spoiled:
            self._explain(schema, spoiled, written, held, args, kwargs, node)
        return out

    def _finish(self, results: Sequence[Tensor], name: str) -> list[Tensor]:
        """Those of the results of an operation, by name, that are bad."""
        spoiled = []
        for value in results:
            self._know_maker(value, name)
            if not is_finite(value):
                spoiled.append(value)
            elif value.numel() * value.element_size() == (
                    value.untyped_storage().nbytes()):
                self._clear(value)
        return spoiled

    def _clear(self, value: Tensor) -> None:
        self._bad.pop(value.untyped_storage()._cdata, None)

    def _see_node(self, name: str) -> None:
        """Remember where the forward of an autograd node is.

        Its sequence number is the last that was given out; what runs below
        it, or without a graph, comes later.
        """
        number = torch._C._autograd._get_sequence_nr() - 1
        if number not in self._nodes:
            self._nodes[number] = (computing()[0] or name, self._sites.here())

    def _see_inputs(self, values: Iterable[Any]) -> None:
        """Remember where the forward of autograd nodes is, by their results.

        That is where a result was written. For torch 2.0, where a node does
        not tell its number.
        """
        for value in values:
            node = value.grad_fn if _is_floating(value) else None
            if node is None or node in self._nodes:
                continue
            maker = self._made.get(value.untyped_storage()._cdata)
            if maker is not None:
                self._nodes[node] = maker[1:]

    def _see_scope(self, name: str, args: tuple[Any, ...]) -> None:
        """Remember the inputs of a half operation made of several."""
        now, count = computing()
        if now is None or count != self._scope[0]:
            self._scope = (count, [])
        if now is not None and name == '_to_copy' and not any(
                value.dtype == torch.float32 for value in args[:1]):
            self._scope[1].append(args[0])

    def _know_maker(self, value: Tensor, name: str) -> None:
        """Remember who allocated memory, for those who write unseen.

        Who wrote to it last where nodes are known by their results.
        """
        storage = value.untyped_storage()
        known = self._made.get(storage._cdata)
        if known is None or known[0].expired() or not HAS_SEQUENCE_NR:
            weak = StorageWeakRef(storage)
            self._made[weak.cdata] = (weak, computing()[0] or name,
                                      self._sites.here())

    def _explain(self, schema: _Schema, spoiled: list[Tensor],
                 written: list[Tensor], held: list[Record], args: Any,
                 kwargs: Any, node: Any) -> None:
        """Tell what made the results of an operation bad."""
        leaves = tree_leaves((args, kwargs))
        own = set(map(id, written))
        inputs = [value for value in leaves
                  if _is_floating(value) and id(value) not in own]
        bad = [value for value in inputs if not is_finite(value)]
        constant = schema.name == 'lift_fresh'
        asked = constant or any(isinstance(value, float) and (
            math.isinf(value) or schema.name in _FILLING
            and _is_beyond(value, spoiled)) for value in leaves)
        name, site = self._place(schema.name, node)
        if constant:
            # Numbers that come in from Python or numpy.
            name, bad = module_of(site), []
        # What passes on something bad is no origin, and is left alone.
        parents = [*held, *self._parents(bad, site)]
        if not (all(parent.meant for parent in parents)
                and self._mend((name, site), spoiled)):
            self._note((name, site), spoiled, parents, inputs, asked,
                       node is not None)

    def _mend(self, place: tuple[str, Site],
              spoiled: Sequence[Tensor]) -> bool:
        """Set results to 0 where that is asked for.

        All of them: what is not bad may be huge, and overflow next.
        """
        if (place[0], place[1].source) not in self._mended:
            return False
        for value in spoiled:
            value.zero_()
            self._clear(value)
        return True

    def _note(self, place: tuple[str, Site], spoiled: Sequence[Tensor],
              parents: list[Record], inputs: Sequence[Tensor],
              asked: bool = False, backward: bool = False) -> None:
        name, site = place
        has_nan = any(bool(value.isnan().any()) for value in spoiled)
        meant = not has_nan and (asked or bool(parents)) and all(
            parent.meant for parent in parents)
        record = Record(self.index - 1, name, site, parents=parents,
                        meant=meant, backward=backward)
        self.seen += not parents
        if record.is_origin and not meant:
            record.inputs = [describe(value)
                             for value in self._scope[1] or inputs]
            record.outputs = [describe(value) for value in spoiled]
            record.rows = bad_rows(spoiled[0])
        for value in spoiled:
            self._mark(value, record)

    def _place(self, name: str, node: Any) -> tuple[str, Site]:
        """Name and place of what runs.

        In a backward those of the forward operation whose gradient it is.
        """
        here = self._sites.here()
        if node is None:
            return computing()[0] or name, here
        if here.source is not None and here.function != 'backward':
            # A hook of somebody's on a gradient.
            return name, here
        kind = node.name()
        # Writing to a slice: its node comes right after the operation's.
        number = _key_of(node, kind.endswith('CopySlices'))
        known, site = self._nodes.get(number, (name, here))
        # Nodes of torch's own end in a number.
        own = kind.endswith('Backward')
        return (kind[:-len('Backward')] if own else known), site

    def _parents(self, bad: Sequence[Tensor], site: Site) -> list[Record]:
        """What made inputs bad: something seen, or somebody outside."""
        parents: list[Record] = []
        for tensor in bad:
            found = self.of(tensor)
            if not found:
                maker = self._made.get(tensor.untyped_storage()._cdata)
                made = maker[2] if maker is not None else site
                found = [Record(
                    self.index - 1, module_of(made), made, seen=False,
                    outputs=[describe(tensor)], rows=bad_rows(tensor))]
                self._mark(tensor, found[0])
            parents.extend(found)
        return parents


def _key_of(node: Any, later: int = 0) -> Any:
    """Return what an autograd node is remembered by.

    Args:
        node: The node.
        later: How many nodes have come between it and its operation.
    """
    return node._sequence_nr() - later if HAS_SEQUENCE_NR else node


def _is_beyond(value: float, results: Sequence[Tensor]) -> bool:
    """Whether a finite number is an infinity in the dtype of a result."""
    return any(abs(value) > torch.finfo(result.dtype).max
               for result in results)
