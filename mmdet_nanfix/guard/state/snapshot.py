"""What hangs below a model at one moment, and what a forward made of it.

Nothing is known of any module: attributes of modules and of the plain
objects that they hold (assigners, samplers, coders) are looked at, down
through lists, dicts and arrays, and buffers by their names.
"""
from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import random
import types
from typing import Any, Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    'ATOMS', 'Diff', 'INTERNAL', 'Snapshot', 'elements', 'same', 'undo_of'
]

Undo = Callable[[], None]

#: Types of values that cannot change, and of what is no state of a model.
ATOMS = frozenset({
    bool, int, float, complex, str, bytes, type(None), type, range, slice,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
    np.dtype,
})
#: Of nn.Module: hooks, and a forward that is wrapped, come and go around a
#: step, parameters are the optimizer's; the others are looked at by name.
INTERNAL = frozenset(
    {'forward', *nn.Module().__dict__} - {'training'})
# Objects of these packages are machinery, not state of a model.
_MACHINERY = ('torch.', 'logging', 'threading', 'multiprocessing',
              'mmengine.logging', 'mmengine.runner', 'mmengine.hooks',
              'mmengine.dataset', 'mmengine.visualization',
              'mmengine.registry', 'mmengine.optim', 'mmdet_nanfix.')
# A container of plain values of this length is a vocabulary, of any values
# of that length it is a dataset.
_LONG, _TOO_LONG = 1000, 5000

_NOTHING: Any = object()
_EMPTY: dict[str, Any] = {}


def undo_of(generator: Any) -> Undo:
    """Undo for a generator object that a module keeps."""
    if isinstance(generator, random.Random):
        state = generator.getstate()
        return lambda: generator.setstate(state)
    if isinstance(generator, np.random.RandomState):
        numpy_state = generator.get_state()
        return lambda: generator.set_state(numpy_state)
    if isinstance(generator, torch.Generator):
        torch_state = generator.get_state()
        return lambda: generator.set_state(torch_state)
    bits = generator.bit_generator
    bits_state = bits.state
    return lambda: setattr(bits, 'state', bits_state)


_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator,
               torch.Generator)


def _is_torchs_layer(module: nn.Module) -> bool:
    """Torch's own layers hold numbers and tuples beside their buffers."""
    kind = type(module)
    return (kind.__module__.startswith('torch.nn.modules')
            and not module._modules and kind is not nn.Module)


def elements(container: Any) -> Any:
    """What a container holds, as a plain list, set or dict."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    return set(container) if isinstance(container, set) else list(container)


def same(left: Any, right: Any) -> bool:
    """Whether two results of :func:`elements` hold the same objects."""
    if isinstance(left, set):
        return left == right
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            value is right[key] for key, value in left.items())
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _refill(container: Any, saved: Any) -> None:
    """Give a container the elements that it had."""
    if isinstance(container, list):
        container[:] = saved
    elif isinstance(container, dict):
        # Of dict itself: subclasses such as ConfigDict convert values.
        own = collections.OrderedDict if isinstance(
            container, collections.OrderedDict) else dict
        own.clear(container)
        for key, value in saved.items():
            own.__setitem__(container, key, value)
    else:
        container.clear()
        (container.update if isinstance(container, set)
         else container.extend)(saved)


@dataclasses.dataclass
class Snapshot:
    """What hangs below some roots at one moment.

    Attributes:
        spaces: Attribute dicts, and copies of them.
        containers: Lists, dicts, sets, deques, and what they hold.
        arrays: numpy arrays, and copies of them.
        tensors: Tensors that may be written to.
        more: None: :class:`.TreeSnapshot` has some that change all the time.
        undos: For generators.
        buffers: The buffers of each module, by name.
        named: Dicts of the buffers and of the children of each module.
        layers: ``id`` of the attribute dicts of torch's own layers.
        generators: Objects that draw random numbers.
        opaque: Whether there is scripted code, which rebinds unseen.
    """

    spaces: list[tuple[dict[str, Any], dict[str, Any]]] = (
        dataclasses.field(default_factory=list))
    containers: list[tuple[Any, Any]] = dataclasses.field(
        default_factory=list)
    arrays: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(
        default_factory=list)
    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    undos: list[Undo] = dataclasses.field(default_factory=list)
    buffers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    named: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    layers: set[int] = dataclasses.field(default_factory=set)
    generators: list[Any] = dataclasses.field(default_factory=list)
    opaque: bool = False
    more: list[Tensor] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, roots: Iterable[Any], parameters: bool = False,
           besides: Iterable[Any] = ()) -> Snapshot:
        """Look at everything below the roots; no device sync.

        Args:
            roots: Modules or any other objects.
            parameters: Take parameters for tensors that may be written to.
            besides: Objects that are not looked at.
        """
        snapshot = cls()
        seen: set[int] = {id(item) for item in besides}
        stack: list[Any] = list(roots)
        while stack:
            item = stack.pop()
            kind = type(item)
            if kind in ATOMS or id(item) in seen:
                continue
            seen.add(id(item))
            # Modules are the most, and their class tells at once.
            stack.extend(snapshot._module(item, parameters)
                         if isinstance(item, nn.Module)
                         else snapshot._look(item, kind, parameters))
        return snapshot

    def _look(self, item: Any, kind: type, parameters: bool
              ) -> Iterable[Any]:
        """Note one object and return what it leads to."""
        if isinstance(item, Tensor):
            if _is_own_state(item, parameters):
                self.tensors.append(item)
            return ()
        if isinstance(item, (list, dict, set, collections.deque)):
            return self._container(item)
        if isinstance(item, (tuple, frozenset)):
            return item if _worth_a_look(item) else ()
        if isinstance(item, np.ndarray):
            if item.flags.writeable:
                self.arrays.append((item, item.copy()))
            return ()
        if isinstance(item, _GENERATORS):
            self.generators.append(item)
            self.undos.append(undo_of(item))
            return ()
        if isinstance(item, types.MethodType):
            return (item.__self__, )
        if isinstance(item, functools.partial):
            return (item.func, item.args, item.keywords)
        if isinstance(item, type) or kind.__module__.startswith(_MACHINERY):
            return ()
        return self._space(item)

    def _space(self, item: Any) -> Iterable[Any]:
        space = getattr(item, '__dict__', None)
        if not isinstance(space, dict):
            return ()
        self.spaces.append((space, space.copy()))
        return space.values()

    def _module(self, module: nn.Module, parameters: bool) -> list[Any]:
        if isinstance(module, torch.jit.ScriptModule):
            self.opaque = True
            return list(module.buffers())
        space = module.__dict__
        self.spaces.append((space, space.copy()))
        found: list[Any] = []
        if _is_torchs_layer(module):
            self.layers.add(id(space))
        else:
            found.extend(
                value for name, value in space.items()
                if type(value) not in ATOMS and name not in INTERNAL)
        if parameters:
            found.extend(space['_parameters'].values())
        for name in ('_buffers', '_modules'):
            named = space[name]
            self.named.append(named)
            self.containers.append((named, named.copy() if named else _EMPTY))
            if named:
                found.extend(named.values())
                if name == '_buffers':
                    self.buffers.append(named)
        return found

    def _container(self, container: Any) -> Iterable[Any]:
        self.containers.append((container, elements(container)))
        found: list[Any] = []
        if type(container).__module__ != 'builtins':
            found.extend(self._space(container))
        values = container.values() if isinstance(container, dict) else (
            container)
        if _worth_a_look(values):
            found.extend(values)
        return found

    def diff(self) -> Diff:
        """What has become different since, but for values of tensors."""
        found = Diff(undos=self.undos)
        for space, before in self.spaces:
            for name in {*space, *before} - INTERNAL:
                old, new = before.get(name, _NOTHING), space.get(
                    name, _NOTHING)
                if old is not new:
                    found.names.append((space, name, old, new))
        for container, held in self.containers:
            now = elements(container)
            if not same(held, now):
                found.elements.append((container, held, now))
        return found


@dataclasses.dataclass
class Diff:
    """What one forward has changed, and can take back.

    Where something else has changed it again after the forward, such as a
    hook between two micro-steps, it is left as it is now.
    """

    names: list[tuple[dict[str, Any], str, Any, Any]] = dataclasses.field(
        default_factory=list)
    elements: list[tuple[Any, Any, Any]] = dataclasses.field(
        default_factory=list)
    undos: list[Undo] = dataclasses.field(default_factory=list)

    def revert(self) -> None:
        """Undo what nobody else has touched since."""
        for container, held, after in self.elements:
            if same(after, elements(container)):
                _refill(container, held)
        for space, name, old, new in self.names:
            if space.get(name, _NOTHING) is not new:
                continue
            if old is _NOTHING:
                space.pop(name, None)
            else:
                space[name] = old
        for undo in self.undos:
            undo()


def _worth_a_look(values: Any) -> bool:
    """Whether the elements of a container may be state of a model."""
    if len(values) <= _LONG:
        return True
    return len(values) <= _TOO_LONG and (
        type(next(iter(values))) not in ATOMS)


def _is_own_state(tensor: Tensor, parameters: bool) -> bool:
    """Tensors that a forward may write to, with values of their own.

    What needs a gradient belongs to the optimizer or to a graph (FSDP's
    views of its flat parameters are such), what was made in inference mode
    cannot be written to, and other layouts than strided are replaced.
    """
    if nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided or (
            tensor.device.type == 'meta' or tensor.is_inference()):
        return False
    if isinstance(tensor, nn.Parameter):
        if not parameters:
            return False
    elif tensor.requires_grad:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().size() > 0
