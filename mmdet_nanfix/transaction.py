"""A training step as a transaction: what a forward changes, and the way back.

A forward moves more than BatchNorm statistics: any buffer, attributes of
modules and of what they hold, and the random number generators.

Not covered: parameters, which only the optimizer moves, state outside of the
model, as in module globals or class attributes, ``__slots__``, and sparse
tensors that are written to in place.
"""
from __future__ import annotations

import random
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)

import numpy as np
import torch
from torch import Tensor, nn

from .picture import Changes, Picture, Undo
from .torch_support import foreach_copy_, not_compiled

__all__ = [
    'Averages', 'Rng', 'Store', 'Transaction', 'cuda_devices', 'has_room'
]


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


def cuda_devices(model: nn.Module) -> list[int]:
    """Indices of the CUDA devices that hold a model."""
    return sorted({parameter.device.index or 0
                   for parameter in model.parameters()
                   if parameter.device.type == 'cuda'})


def has_room(devices: Iterable[int], times: float = 1.) -> bool:
    """Whether CUDA devices have the memory for one more step like the last.

    What the allocator has at hand or the device has left, against the peak
    of the steps so far. True for no devices.

    Args:
        devices: Their indices.
        times: That much more than the last step needed.
    """
    for device in devices:
        allocated = torch.cuda.memory_allocated(device)
        needed = times * (
            torch.cuda.max_memory_allocated(device) - allocated)
        left = torch.cuda.mem_get_info(device)[0] + (
            torch.cuda.memory_reserved(device) - allocated)
        if left < needed:
            return False
    return True


class Store:
    """Copies of tensors, in memory that is used again each time."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors; one fused call for each dtype and device."""
        held: dict[int, tuple[Tensor, Tensor]] = {}
        fused: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for tensor in tensors:
            known, copy = self._held.get(id(tensor), (None, None))
            if known is not tensor or copy is None or (
                    copy.shape != tensor.shape
                    or copy.dtype != tensor.dtype):
                copy = torch.empty_like(tensor, requires_grad=False)
            held[id(tensor)] = (tensor, copy)
            kind = tensor.dtype, tensor.device
            if kind not in fused:
                fused[kind] = [], []
            fused[kind][0].append(copy)
            fused[kind][1].append(tensor)
        self._held = held
        with torch.no_grad():
            for copies, originals in fused.values():
                foreach_copy_(copies, originals)

    def differs(self, tensor: Tensor) -> bool:
        """Whether a tensor is not what it was; reads from the device."""
        known, copy = self._held.get(id(tensor), (None, None))
        return known is not tensor or copy is None or not torch.equal(
            copy, tensor)

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
    """What the forwards of a window change in a model, and the way back.

    Args:
        model: The bare model; nothing is left on it.
        others: State elsewhere: each is called when a forward begins,
            returns what is called when it has ended, which returns what
            takes back what happened in between.
    """

    def __init__(self, model: nn.Module,
                 others: Sequence[Callable[[], Callable[[], Undo]]] = ()
                 ) -> None:
        self.model = model
        self._others = others
        self._devices = cuda_devices(model)
        self._store = Store()
        self._before: Picture | None = None
        self._ends: list[Callable[[], Undo]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._settled: list[Changes] = []
        self._rng = Rng(self._devices)
        self.open = False

    def begin(self) -> None:
        """Remember everything, before each forward of a window.

        The first of a window copies the tensors, one fused call for each
        dtype; no device sync. The generators go back to the last: a window
        that is taken back must not repeat the draws of the data loading
        that happened in it.
        """
        self._rng = Rng(self._devices)
        self._before = Picture.of([self.model])
        self._ends = [other() for other in self._others]
        if not self.open:
            self._store.copy(self._before.tensors)
            self._arrays = self._before.arrays
            self.open = True

    def settle(self) -> None:
        """Note what the last forward has changed, before hooks run."""
        if self._before is None:
            return
        changes = self._before.changes()
        changes.undos = changes.undos + [end() for end in self._ends]
        self._settled.append(changes)
        self._before = None

    def buffers(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """The model's buffers as they are now, and where they are kept.

        Those of modules that the last forward has made are not among them.
        """
        for named in self._before.buffers if self._before else ():
            for name, buffer in named.items():
                if buffer is not None:
                    yield (id(named), name), buffer

    @property
    def rng(self) -> Rng:
        """The generators as they were when the last forward began."""
        return self._rng

    @not_compiled
    def rng_now(self) -> Rng:
        """The generators as they are now."""
        return Rng(self._devices)

    def reset(self) -> None:
        """Take back everything, and begin again from there."""
        if self.open:
            self.rollback()
            self.begin()

    def commit(self) -> None:
        """What happened in the window stays."""
        # Let go of what the model held before.
        self.open = False
        self._before, self._ends, self._settled = None, [], []
        self._arrays = []

    def rollback(self) -> None:
        """Take back everything that the forwards of the window changed."""
        if not self.open:
            return
        self.settle()
        for changes in reversed(self._settled):
            changes.take_back()
        for array, values in self._arrays:
            array[...] = values
        self._store.restore()
        self._rng.restore()
        self.commit()


class Averages:
    """What other objects keep of a model: averages, shadows, teachers.

    Their tensors are remembered, and where one has moved, the numbers beside
    it (a count of updates). Nothing else of them is touched: a list that
    has grown is a record, not an average.

    Args:
        roots: Objects that may keep some.
        besides: Objects that are not looked at, such as the model.
    """

    def __init__(self, roots: Iterable[Any],
                 besides: Iterable[Any] = ()) -> None:
        self._roots = list(roots)
        self._besides = list(besides)
        self._pictures: list[Picture] = []
        self._store = Store()
        self._keepers: list[Any] = []
        self._looks = 0

    def copy(self, tensors: Iterable[Tensor] = (),
             often: bool = False) -> None:
        """Remember them, and some tensors more.

        Args:
            tensors: The others.
            often: This is done all the time: roots that have held no tensor
                so far are looked at now and then only.
        """
        self._looks += 1
        everywhere = not often or self._looks <= 3 or self._looks % 50 == 0
        roots = self._roots if everywhere else self._keepers
        found = [(root, Picture.of([root.__dict__], True, self._besides))
                 for root in roots]
        self._keepers = [root for root, picture in found if picture.tensors]
        self._pictures = [picture for _, picture in found if picture.tensors]
        every = {id(tensor): tensor for picture in self._pictures
                 for tensor in picture.tensors}
        every.update((id(tensor), tensor) for tensor in tensors)
        self._store.copy(list(every.values()))

    def restore(self) -> None:
        """Make them what they were; reads from the device."""
        for picture in self._pictures:
            changes = picture.changes()
            pairs = list(changes.names)
            for container, held, now in changes.elements:
                pairs.extend(_pairs(container, held, now))
            averages = [pair for pair in pairs if _is_average(*pair[2:])]
            if averages or any(map(self._store.differs, picture.tensors)):
                counts = [pair for pair in pairs
                          if type(pair[2]) in (int, float)]
                for place, key, old, _ in averages + counts:
                    place[key] = old
        self._store.restore()


def _pairs(container: Any, held: Any, now: Any) -> Iterator[Any]:
    """What a dict or a list of unchanged length has replaced, and where."""
    if len(held) == len(now) and isinstance(container, (dict, list)):
        for key in (held if isinstance(held, dict) else range(len(held))):
            new = now.get(key) if isinstance(now, dict) else now[key]
            if held[key] is not new:
                yield container, key, held[key], new


def _is_average(old: Any, new: Any) -> bool:
    """A tensor, or a dict or list of tensors with as many as before."""
    if isinstance(old, Tensor):
        return True
    if type(new) is not type(old) or not isinstance(old, (dict, list)) or (
            not old or len(new) != len(old)):
        return False
    values = old.values() if isinstance(old, dict) else old
    return all(isinstance(value, Tensor) for value in values)
