"""A training step as a transaction: what a forward changes, and the way back.

A forward moves more than BatchNorm statistics: any buffer, attributes of
modules and of what they hold, and the random number generators.

Not covered: parameters, which only the optimizer moves, state outside of the
model, as in module globals or class attributes, ``__slots__``, and sparse
tensors that are written to in place.
"""
from __future__ import annotations

from typing import Any, Callable, Protocol, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...torch_support import foreach_copy_, not_compiled
from .batch import Rng, cuda_devices
from .snapshot import Diff, Snapshot

__all__ = ['TensorBackup', 'Transaction']


class Remembered(Protocol):
    """What hung below a model, as :class:`.Snapshot` has it."""

    tensors: list[Tensor]
    more: list[Tensor]
    arrays: list[tuple[np.ndarray, np.ndarray]]
    buffers: list[dict[str, Any]]

    def diff(self) -> Diff:
        """What has become different since."""


class Transaction:
    """What the forwards of a window change in a model, and the way back.

    Args:
        model: The bare model; nothing is left on it.
        others: Remember state elsewhere, when a forward begins.
        look: Remembers what hangs below the model, such as a
            :class:`.StateTree`; None looks at the whole each time.

    Attributes:
        backup: Copies of the tensors that a forward may write to.
        open: Whether a window has begun and is not decided yet.
    """

    def __init__(self, model: nn.Module,
                 others: Sequence[Callable[[], Snapshot]] = (),
                 look: Callable[[], Remembered] | None = None) -> None:
        self.model = model
        self._others = others
        self._devices = cuda_devices(model)
        self.backup, self._more = TensorBackup(), TensorBackup()
        self._look = look or (lambda: Snapshot.of([model]))
        self._before: Remembered | None = None
        self._elsewhere: list[Snapshot] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._settled: list[Diff] = []
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
        self._before = self._look()
        self._elsewhere = [other() for other in self._others]
        if not self.open:
            self.backup.copy(self._before.tensors)
            self._more.copy(self._before.more)
            self._arrays = self._before.arrays
            self.open = True

    def settle(self) -> None:
        """Note what the last forward has changed, before hooks run."""
        if self._before is None:
            return
        diff = self._before.diff()
        diff.undos = diff.undos + [
            elsewhere.diff().revert for elsewhere in self._elsewhere]
        self._settled.append(diff)
        self._before = None

    def buffers(self) -> Sequence[dict[str, Any]]:
        """The model's buffers as they are now: the dict of each module.

        Those of modules that the last forward has made are not among them.
        """
        return self._before.buffers if self._before else []

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
        self._before, self._elsewhere, self._settled = None, [], []
        self._arrays = []

    def rollback(self) -> None:
        """Take back everything that the forwards of the window changed."""
        if not self.open:
            return
        self.settle()
        for diff in reversed(self._settled):
            diff.revert()
        for array, values in self._arrays:
            array[...] = values
        self.backup.restore()
        self._more.restore()
        self._rng.restore()
        self.commit()


class TensorBackup:
    """Copies of tensors, in memory that is used again each time."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._last: Sequence[Tensor] = ()
        self._sizes: list[int] = []
        self._fused: list[tuple[list[Tensor], list[Tensor]]] = []

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors; one fused call for each dtype and device.

        Args:
            tensors: Where it is the same list as before it costs little more
                than these calls; a list must not be changed.
        """
        sizes = list(map(Tensor.numel, tensors))
        if tensors is not self._last or sizes != self._sizes:
            self._group(tensors)
            self._last, self._sizes = tensors, sizes
        try:
            self._copy()
        except RuntimeError:
            # One has another shape or dtype by now.
            self._group(tensors)
            self._copy()

    def _copy(self) -> None:
        with torch.no_grad():
            for copies, originals in self._fused:
                foreach_copy_(copies, originals)

    def _group(self, tensors: Sequence[Tensor]) -> None:
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
            copies, originals = fused.setdefault(kind, ([], []))
            copies.append(copy)
            originals.append(tensor)
        self._held, self._fused = held, list(fused.values())

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(copy.numel() * copy.element_size()
                   for _, copy in self._held.values())

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
