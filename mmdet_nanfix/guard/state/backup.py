"""Copy tensors, and write the copies back."""
from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from ...torch_support import foreach_copy_

__all__ = ['TensorBackup']


class TensorBackup:
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
