"""Remember random number generators, and look for room on a device."""
from __future__ import annotations

import random
from typing import Iterable

import numpy as np
import torch
from torch import nn

__all__ = ['Rng', 'cuda_devices', 'has_room']


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
