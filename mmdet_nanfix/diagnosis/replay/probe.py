"""Trace non-finite numbers to their origins, in a replay.

It sees each operation of a forward and of its backward. One whose inputs are
finite and whose output is not is an *origin*; one that is given something
non-finite passes it on. Which origins count is told by going back from what
must be finite (a loss, gradients, buffers): an infinity that softmax absorbs,
or that nothing uses, is never met on that way.
"""
from __future__ import annotations

import contextlib
import functools
import math
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)

from ...guard.checks import is_finite
from ...torch_support import HAS_SEQUENCE_NR, Patches, tree_leaves
from .call_site import CallSites, NodeSites
from .op_record import (
    BadStorages,
    CallSite,
    OpRecord,
    OpSchema,
    bad_rows,
    describe,
    function_of,
    is_beyond,
    is_floating,
)

__all__ = ['NonFiniteTracer']


class NonFiniteTracer(TorchDispatchMode):
    """Follows non-finite numbers through a forward and a backward.

    For replays: each operation reads from the device once.

    Args:
        sites: Finds places in the code.
        half_op: Gives the half operation that is emulated right now, as
            :meth:`.Trainer.half_op`.
        given: What is non-finite from the start: name and tensor by kind.
        meant: Buffers that hold infinities on purpose.
        mended: Name and source of origins whose result is set to 0, all of
            it; None for every result that is not finite, on purpose apart.

    Attributes:
        index: Operations so far.
        seen: Operations so far that made something non-finite of what was
            not, on purpose or not, whatever became of it.
        running: The operation that is under way, or that raised.
    """

    def __init__(self, sites: CallSites,
                 half_op: Callable[[], tuple[str | None, int]],
                 given: Iterable[tuple[str, str, Tensor]] = (),
                 meant: Iterable[Tensor] = (),
                 mended: Iterable[tuple[str, str | None]] | None = ()
                 ) -> None:
        super().__init__()
        self.index = 0
        self.seen = 0
        self.running: str | None = None
        self._sites = sites
        self._half_op = half_op
        self._mended = None if mended is None else frozenset(mended)
        self._bad = BadStorages()
        self._made: dict[int, tuple[StorageWeakRef, str, CallSite]] = {}
        self._nodes = NodeSites()
        # The half operation that is being computed, and its inputs.
        self._scope: tuple[int, list[Tensor]] = (0, [])
        for kind, name, tensor in given:
            self._bad.mark(tensor, OpRecord(
                -1, kind, CallSite(), (kind, name),
                outputs=[describe(tensor)]))
        for tensor in meant:
            self._bad.mark(tensor, OpRecord(-1, 'buffer', CallSite(),
                                            meant=True))

    def of(self, tensor: Tensor) -> list[OpRecord]:
        """What made a tensor non-finite; nothing where it is finite."""
        return self._bad.of(tensor)

    def origins(self, tensors: Iterable[Tensor]) -> list[OpRecord]:
        """The origins that reached any of the tensors, in their order."""
        return self._bad.origins(tensors)

    def made_at(self, node: Any) -> CallSite | None:
        """Where the operation of an autograd node was called from."""
        found = self._nodes.find(node)
        return found[1] if found is not None else None

    @contextlib.contextmanager
    def following(self, modules: Iterable[ModuleType]) -> Iterator[None]:
        """Region in which operations are followed.

        Args:
            modules: Of compiled functions that torch does not dispatch.
        """
        with Patches('replay') as patches:
            for module in modules:
                for name, function in list(vars(module).items()):
                    if callable(function) and not (
                            name.startswith('_')
                            or isinstance(function, type)):
                        patches.wrap(module, name, functools.partial(
                            functools.partial, self.untraced, name))
            with self:
                yield

    def untraced(self, name: str, function: Callable[..., Any], /,
                 *args: Any, **kwargs: Any) -> Any:
        """Run a compiled function that torch does not dispatch.

        Args:
            name: What to call it.
            function: It; tensors among its arguments may be written to.
            *args: Its arguments.
            **kwargs: Likewise.
        """
        tensors = [value for value in tree_leaves((args, kwargs))
                   if is_floating(value)]
        with _disable_current_modes():
            bad = [tensor for tensor in tensors if not is_finite(tensor)]
        start = self.index
        out = function(*args, **kwargs)
        with _disable_current_modes():
            had = set(map(id, bad))
            results = [value for value in (*tensors, *tree_leaves(out))
                       if is_floating(value) and id(value) not in had
                       and not is_finite(value)]
            self._finish(results, name)
            self.index += 1
            inside = [record for result in results
                      for record in self.of(result)
                      if record.index >= start]
            for record in inside:
                # On a GPU this is one operation.
                record.op = name
            site = self._sites.here()
            if results and (not inside or not bad and (
                    name, site.source) in (self._mended or ())):
                self._take_in((name, site), results,
                              self._parents(bad, site), tensors)
        return out

    def __torch_dispatch__(self, func: Any, types: Any,
                           args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        schema = OpSchema.of(func)
        # Within a backward a checkpointed forward runs with gradients on.
        node = None if torch.is_grad_enabled() else (
            torch._C._current_autograd_node())
        places = [(place, value) for place, value in (
            *enumerate(args), *kwargs.items()) if place in schema.writes]
        written = [value for value in tree_leaves([
            value for _, value in places]) if is_floating(value)]
        # What is given by name is filled (``out=``), the rest is changed.
        changed = [] if schema.overwrites else tree_leaves([
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
                self._nodes.note_last(self._half_op()[0] or schema.name,
                                      self._sites.here)
            self._see_scope(schema.name, args)
        if schema.is_view and schema.name != 'lift_fresh':
            return out
        results = list({id(value): value for value in (
            *tree_leaves(out), *written) if is_floating(value)}.values())
        if schema.leaves_unwritten:
            for value in results:
                self._bad.clear(value)
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
                self._bad.clear(value)
        return spoiled

    def _see_inputs(self, values: Iterable[Any]) -> None:
        """Remember where the forward of autograd nodes is, by their results.

        That is where a result was written. For torch 2.0, where a node does
        not tell its number.
        """
        for value in values:
            node = value.grad_fn if is_floating(value) else None
            if node is None or self._nodes.knows(node):
                continue
            maker = self._made.get(value.untyped_storage()._cdata)
            if maker is not None:
                self._nodes.note(node, maker[1:])

    def _see_scope(self, name: str, args: tuple[Any, ...]) -> None:
        """Remember the inputs of a half operation made of several."""
        now, count = self._half_op()
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
            self._made[weak.cdata] = (weak, self._half_op()[0] or name,
                                      self._sites.here())

    def _explain(self, schema: OpSchema, spoiled: list[Tensor],
                 written: list[Tensor], held: list[OpRecord], args: Any,
                 kwargs: Any, node: Any) -> None:
        """Tell what made the results of an operation bad."""
        leaves = tree_leaves((args, kwargs))
        own = set(map(id, written))
        inputs = [value for value in leaves
                  if is_floating(value) and id(value) not in own]
        bad = [value for value in inputs if not is_finite(value)]
        constant = schema.name == 'lift_fresh'
        asked = constant or any(isinstance(value, float) and (
            math.isinf(value) or schema.fills
            and is_beyond(value, spoiled)) for value in leaves)
        name, site = self._place(schema.name, node)
        if constant:
            # Numbers that come in from Python or numpy.
            name, bad = function_of(site), []
        self._take_in((name, site), spoiled, [
            *held, *self._parents(bad, site)], inputs, asked,
                      node is not None)

    def _take_in(self, place: tuple[str, CallSite],
                 spoiled: Sequence[Tensor], parents: list[OpRecord],
                 inputs: Sequence[Tensor], asked: bool = False,
                 backward: bool = False) -> None:
        """Mend the bad results of an operation, or note them."""
        name, site = place
        meant = (asked or bool(parents)) and all(
            parent.meant for parent in parents) and not any(
                bool(value.isnan().any()) for value in spoiled)
        record = OpRecord(self.index - 1, name, site, parents=parents,
                          meant=meant, backward=backward)
        # What passes on something bad is no origin, and is left alone.
        if not meant if self._mended is None else record.is_origin and (
                name, site.source) in self._mended:
            for value in spoiled:
                # All of it: what is huge would overflow next.
                value.zero_()
                self._bad.clear(value)
            return
        self.seen += not parents
        if record.is_origin and not meant:
            record.inputs = [describe(value)
                             for value in self._scope[1] or inputs]
            record.outputs = [describe(value) for value in spoiled]
            record.rows = bad_rows(spoiled[0])
        for value in spoiled:
            self._bad.mark(value, record)

    def _place(self, name: str, node: Any) -> tuple[str, CallSite]:
        """Name and place; in a backward those of the forward operation."""
        here = self._sites.here()
        if node is None:
            return self._half_op()[0] or name, here
        if here.source is not None and here.function != 'backward':
            # A hook of somebody's on a gradient.
            return name, here
        kind = node.name()
        # Writing to a slice: its node comes right after the operation's.
        known, site = self._nodes.find(
            node, kind.endswith('CopySlices')) or (name, here)
        # Nodes of torch's own end in a number.
        own = kind.endswith('Backward')
        return (kind[:-len('Backward')] if own else known), site

    def _parents(self, bad: Sequence[Tensor], site: CallSite
                 ) -> list[OpRecord]:
        """What made inputs bad: something seen, or somebody outside."""
        parents: list[OpRecord] = []
        for tensor in bad:
            found = self.of(tensor)
            if not found:
                maker = self._made.get(tensor.untyped_storage()._cdata)
                made = maker[2] if maker is not None else site
                found = [OpRecord(
                    self.index - 1, function_of(made), made, seen=False,
                    outputs=[describe(tensor)], rows=bad_rows(tensor))]
                self._bad.mark(tensor, found[0])
            parents.extend(found)
        return parents
