"""A training step as a transaction: what a forward changes, and the way back.

A forward moves more than BatchNorm statistics: any buffer, by name, since a
module may assign a new tensor to it; attributes of modules and of the plain
objects that they hold (assigners, samplers, coders), down through lists,
dicts and arrays; the random number generators. Nothing is known of any
module: everything that hangs below the model is looked at.

Not covered: parameters, which only the optimizer moves, and state outside
of the model, as in module globals or class attributes.
"""
import collections
import random
import types
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Sequence,
    Set,
    Tuple,
)

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ['Rng', 'Store', 'Transaction']

Undo = Callable[[], None]

# Values that cannot change, and what is no state of a model.
_ATOMS = frozenset({
    bool, int, float, complex, str, bytes, type(None), type, range, slice,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.ModuleType, torch.dtype, torch.device, torch.Size,
    torch.memory_format, torch.layout, np.dtype, nn.Parameter,
})
# Of nn.Module: hooks, and a forward that is wrapped, come and go around a
# step, parameters are the optimizer's; the others are looked at by name.
_INTERNAL = frozenset(
    {'forward', *nn.Module().__dict__} - {'training'})
# Objects of these packages are machinery, not state of a model.
_MACHINERY = ('torch.', 'logging', 'threading', 'multiprocessing',
              'mmengine.logging', 'mmengine.runner', 'mmengine.hooks',
              'mmengine.dataset', 'mmengine.visualization',
              'mmengine.registry', 'mmengine.optim')
# Longer containers are vocabularies and class names: they are copied, but
# their elements are not looked at.
_LONG = 1000


class Rng:
    """The state of all random number generators that a step may draw from.

    Python's, numpy's, torch's, and those of CUDA devices. Taking it costs
    about 30 microseconds and no device sync.

    Args:
        devices: Indices of the CUDA devices in use.
    """

    def __init__(self, devices: Iterable[int] = ()) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = [(device, torch.cuda.get_rng_state(device))
                      for device in devices]

    def restore(self) -> None:
        """Set all of them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)


def cuda_devices(model: nn.Module) -> List[int]:
    """Indices of the CUDA devices that hold a model."""
    return sorted({parameter.device.index or 0
                   for parameter in model.parameters()
                   if parameter.device.type == 'cuda'})


def _generator_undo(generator: Any) -> Undo:
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


class Store:
    """Copies of tensors, in memory that is used again each time."""

    def __init__(self) -> None:
        self._held: Dict[int, Tuple[Tensor, Tensor]] = {}

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors; one fused call for each dtype and device."""
        held, fused = {}, collections.defaultdict(list)
        for tensor in tensors:
            known, copy = self._held.get(id(tensor), (None, None))
            if known is not tensor or copy is None or (
                    copy.shape != tensor.shape or copy.dtype != tensor.dtype
                    or copy.device != tensor.device):
                copy = torch.empty_like(tensor, requires_grad=False)
            held[id(tensor)] = (tensor, copy)
            fused[tensor.dtype, tensor.device].append((copy, tensor))
        self._held = held
        with torch.no_grad():
            for pairs in fused.values():
                torch._foreach_copy_([copy for copy, _ in pairs],
                                     [tensor for _, tensor in pairs])

    def restore(self) -> None:
        """Write the copies back, whatever became of shape and strides."""
        with torch.no_grad():
            for tensor, copy in self._held.values():
                if tensor.shape == copy.shape and (
                        torch._debug_has_internal_overlap(tensor) != 1):
                    tensor.copy_(copy)
                else:
                    tensor.data = copy.clone()


class Transaction:
    """What a forward changes in a model, and the way back.

    Args:
        model: The bare model; nothing is left on it.
        others: State elsewhere: each is called when the transaction begins
            and returns what takes the state back.
    """

    def __init__(self, model: nn.Module,
                 others: Sequence[Callable[[], Undo]] = ()) -> None:
        self.model = model
        self._others = others
        self._devices = cuda_devices(model)
        self._store = Store()
        self._spaces: List[Tuple[Dict[str, Any], Dict[str, Any]]] = []
        self._containers: List[Tuple[Any, Any]] = []
        self._arrays: List[Tuple[np.ndarray, np.ndarray]] = []
        self._undos: List[Undo] = []
        self._rng = Rng(self._devices)
        self.open = False

    def begin(self) -> None:
        """Remember everything, before the first forward of a window.

        One fused copy of the buffers for each dtype; no device sync.
        """
        self._spaces, self._containers, self._arrays = [], [], []
        self._undos = [other() for other in self._others]
        self._store.copy(self._walk())
        self.mark_rng()
        self.open = True

    def mark_rng(self) -> None:
        """Remember the generators, before each forward of a window.

        A window that is taken back must not repeat the draws of the data
        loading that happened in it.
        """
        self._rng = Rng(self._devices)

    def rng_now(self) -> Rng:
        """The generators as they are now."""
        return Rng(self._devices)

    def reset(self) -> None:
        """Take back everything, and begin again from there."""
        if self.open:
            rng = self._rng
            self.rollback()
            self.begin()
            self._rng = rng

    def commit(self) -> None:
        """What happened since :meth:`begin` stays."""
        self._forget()

    def _forget(self) -> None:
        """Let go of what the model held before."""
        self.open = False
        self._spaces, self._containers, self._arrays = [], [], []
        self._undos = []

    def rollback(self) -> None:
        """Take back everything that happened since :meth:`begin`."""
        if not self.open:
            return
        for space, saved in self._spaces:
            for name in [name for name in space
                         if name not in saved and name not in _INTERNAL]:
                del space[name]
            for name, value in saved.items():
                if name not in _INTERNAL and (
                        name not in space or space[name] is not value):
                    space[name] = value
        for container, elements in self._containers:
            _refill(container, elements)
        for array, values in self._arrays:
            array[...] = values
        self._store.restore()
        for undo in self._undos:
            undo()
        self._rng.restore()
        self._forget()

    def _walk(self) -> List[Tensor]:
        """Note all that hangs below the model; the tensors among it."""
        tensors: List[Tensor] = []
        seen: Set[int] = set()
        stack: List[Any] = [self.model]
        while stack:
            item = stack.pop()
            kind = type(item)
            if kind in _ATOMS or id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, nn.Module):
                stack.extend(self._of_module(item))
            elif isinstance(item, Tensor):
                if _is_own_state(item):
                    tensors.append(item)
            elif isinstance(item, (list, dict, set, collections.deque)):
                stack.extend(self._of_container(item))
            elif isinstance(item, (tuple, frozenset)):
                if len(item) <= _LONG:
                    stack.extend(item)
            elif isinstance(item, np.ndarray):
                self._arrays.append((item, item.copy()))
            elif isinstance(item, _GENERATORS):
                self._undos.append(_generator_undo(item))
            elif hasattr(item, '__dict__') and not isinstance(
                    item, type) and not kind.__module__.startswith(
                        _MACHINERY):
                space = item.__dict__
                if isinstance(space, dict):
                    self._spaces.append((space, space.copy()))
                    stack.extend(space.values())
        return tensors

    def _of_module(self, module: nn.Module) -> Iterator[Any]:
        space = module.__dict__
        self._spaces.append((space, space.copy()))
        for name, value in space.items():
            if type(value) not in _ATOMS and name not in _INTERNAL:
                yield value
        for name in ('_buffers', '_modules'):
            named = space.get(name)
            if isinstance(named, dict):
                self._containers.append((named, named.copy()))
                yield from named.values()

    def _of_container(self, container: Any) -> Iterable[Any]:
        if isinstance(container, dict):
            self._containers.append((container, dict.copy(container)))
            values: Iterable[Any] = dict.values(container)
        else:
            self._containers.append((container, container.copy()))
            values = container
        return values if len(container) <= _LONG else ()


def _is_own_state(tensor: Tensor) -> bool:
    """Tensors that a forward may write to, with values of their own.

    What needs a gradient belongs to the optimizer or to a graph (FSDP's
    views of its flat parameters are such), and other layouts than strided
    are replaced, not written to.
    """
    return (not tensor.requires_grad and tensor.layout == torch.strided
            and tensor.device.type != 'meta' and tensor.numel() > 0
            and tensor.untyped_storage().size() > 0)
