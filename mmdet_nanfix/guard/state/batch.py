"""Remember what a forward begins with: a batch, random number generators."""
from __future__ import annotations

import itertools
import random
from typing import Any, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from ...torch_support import walk

__all__ = ['BatchSnapshot', 'Rng', 'cuda_devices', 'has_room']

_ATOMS = (str, bytes, int, float, bool, type(None), np.ndarray)
_MANY = 20000
_LONG = 100


class BatchSnapshot:
    """Remembers a batch without copying its pixels; no device sync.

    What a model does to it on the way (padding its masks, adding to its
    data samples) replaces attributes and elements, which are put back.
    Tensors that it writes to in place are copied only where ``copies``
    says so.

    Args:
        value: The batch.
        copies: Whether tensors are copied too, but for large ones. Arrays
            of numpy never are.

    Attributes:
        whole: Whether all of it was looked at; a batch of very many objects
            is not.
    """

    def __init__(self, value: Any, copies: bool = False) -> None:
        self.value = value
        self._held: list[tuple[Any, Any]] = []
        self._versions: list[tuple[Tensor, int, Tensor | None]] = []
        objects = walk([value], self._below)
        for item in itertools.islice(objects, _MANY):
            if isinstance(item, Tensor):
                self._tensor(item, copies)
        self.whole = next(objects, objects) is objects

    def _below(self, item: Any) -> Iterable[Any]:
        """Keep what a container holds, and return it."""
        if isinstance(item, dict):
            self._held.append((item, dict(item)))
            return list(item.values())
        if isinstance(item, (list, set)):
            self._held.append((item, item.copy()))
        if isinstance(item, (list, set, tuple)):
            # A list of numbers can be long, and is kept already.
            return item if len(item) < _LONG else [
                part for part in item if not isinstance(part, _ATOMS)]
        return [item.__dict__] if hasattr(item, '__dict__') and not (
            callable(item) or isinstance(item, (Tensor, np.ndarray))) else ()

    def _tensor(self, tensor: Tensor, copies: bool) -> None:
        # What was made in inference mode cannot be written to here, and
        # does not count who has.
        if tensor.is_inference():
            return
        small = copies and tensor.numel() < 1 << 16 and (
            torch._debug_has_internal_overlap(tensor) != 1)
        self._versions.append((tensor, tensor._version,
                               tensor.detach().clone() if small else None))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of it."""
        return [tensor for tensor, _, _ in self._versions]

    @property
    def written_to(self) -> bool:
        """Whether a tensor of it was changed in place since."""
        return any(tensor._version != version
                   for tensor, version, _ in self._versions)

    @property
    def is_restorable(self) -> bool:
        """Whether it can be put back as it was."""
        return self.whole and all(
            tensor._version == version or before is not None
            for tensor, version, before in self._versions)

    def restore(self) -> Any:
        """The batch, as it was."""
        for container, held in self._held:
            if isinstance(container, list):
                container[:] = held
            else:
                container.clear()
                container.update(held)
        for index, (tensor, version, before) in enumerate(self._versions):
            if before is not None and tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(before)
                self._versions[index] = (tensor, tensor._version, before)
        return self.value


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
