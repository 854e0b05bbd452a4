"""Finite checks: before a failure without reading, after one by name.

:class:`Anchor` folds "the loss is not finite" into one gradient, so that the
check of the gradients, which an AMP step makes anyway, answers for both. The
other functions read from the device and are meant for after a failure.
"""
from __future__ import annotations

import math
from collections import deque
from typing import (
    Any,
    Callable,
    Collection,
    Iterator,
    Sequence,
)

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .torch_support import tree_leaves

__all__ = [
    'Anchor', 'FillGauge', 'bad_tensors', 'can_be_checked', 'describe',
    'flag_of', 'is_finite', 'kind_of', 'leaves_of', 'norm_of'
]


_CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def can_be_checked(tensor: Tensor) -> bool:
    """Whether a tensor has values whose infinity norm torch can take."""
    return (tensor.dtype in _CHECKED and not nn.parameter.is_lazy(tensor)
            and tensor.layout == torch.strided and tensor.numel() > 0
            and tensor.device.type != 'meta')


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Leaves that the graph of a loss reaches, the nearest first.

    Walks the autograd graph in Python; no device sync.
    """
    seen = set()
    queue: deque[Any] = deque([loss.grad_fn])
    while queue:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, 'variable', None)
        if leaf is not None:
            yield leaf
        queue.extend(parent for parent, _ in node.next_functions)


class Anchor:
    """One element of one parameter that carries the state of the loss.

    ``loss - loss`` is 0 where the loss is finite and NaN where it is not.
    Times the anchor element and added to the loss, it makes that one
    gradient element NaN and leaves every other gradient as evidence; a
    healthy gradient is unchanged (``torch.equal``; -0.0 becomes 0.0). No
    device sync.

    Args:
        candidates: Returns the ``id`` of each parameter that can carry it.

    Attributes:
        parameter: The one that carries it now.
    """

    def __init__(self,
                 candidates: Callable[[], Collection[int]]) -> None:
        self._candidates = candidates
        self.parameter: Tensor | None = None

    def attach(self, loss: Tensor, flag: Tensor | None = None) -> Tensor:
        """Return the loss with the anchor term.

        Args:
            loss: Scalar; returned as it is where no parameter can carry it.
            flag: What is told beside the state of the loss: a scalar, 0 or
                NaN.
        """
        self.parameter = self._choose(loss) if loss.requires_grad else None
        if self.parameter is None:
            return loss
        value = loss.detach()
        value = value - value
        if flag is not None:
            value = value + flag
        element = self.parameter[(0, ) * self.parameter.dim()]
        return loss + element.to(loss.dtype) * value.to(loss.dtype)

    def _choose(self, loss: Tensor) -> Tensor | None:
        """The nearest one-dimensional candidate in the graph of the loss.

        In this graph and no other: a gradient of its own would let weight
        decay and momentum move a parameter that is not in use. One
        dimension, because such gradients are dense and have one memory
        layout. The nearest, because it is found after a few dozen nodes.
        """
        usable = self._candidates()
        fallback = None
        for leaf in leaves_of(loss):
            if id(leaf) not in usable or not (
                    leaf.requires_grad and can_be_checked(leaf)):
                continue
            if leaf.dim() == 1:
                return leaf
            fallback = fallback if fallback is not None else leaf
        return fallback

    def own_gradient_finite(self) -> bool:
        """Whether the anchor's gradient is finite but for the flag.

        One read from the device.
        """
        if self.parameter is None or self.parameter.grad is None:
            return True
        grad = self.parameter.grad.detach().flatten()
        return not bad_tensors([grad[1:]])


def _values(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def bad_tensors(tensors: Sequence[Tensor | None]) -> list[int]:
    """Indices of the tensors that hold a NaN or an infinity.

    One read for each dtype and device among them. The infinity norm
    propagates both and, unlike a sum, cannot overflow by itself.

    Args:
        tensors: Of any shape, layout and floating dtype; None, empty and
            other dtypes count as finite.
    """
    alike: dict[Any, tuple[list[int], list[Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        if tensor is None or nn.parameter.is_lazy(tensor):
            continue
        value = _values(tensor)
        if can_be_checked(value):
            index, values = alike.setdefault(
                (value.dtype, value.device), ([], []))
            index.append(i)
            values.append(value)
    bad: list[int] = []
    for index, values in alike.values():
        # Together on the device: each transfer by itself would be a read.
        norms = torch.stack(torch._foreach_norm(values, math.inf))
        bad.extend(i for i, ok in zip(index, norms.isfinite().tolist())
                   if not ok)
    return sorted(bad)


def flag_of(tensors: Sequence[Tensor], device: torch.device
            ) -> Tensor | None:
    """0 where all tensors are finite and NaN where one is not.

    Four calls in all, no device sync.

    Args:
        tensors: Floating, not empty.
        device: Where the answer is needed.

    Returns:
        A scalar; None for no tensors.
    """
    if not tensors:
        return None
    norms = torch._foreach_norm(tensors, math.inf)
    stacked = torch.stack([
        norm if norm.device == device else norm.to(device)
        for norm in norms])
    return (stacked - stacked).sum()


def norm_of(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """L2 norm of all tensors together, in fp32; no device sync.

    Three calls for tensors of one dtype and device; strided tensors only.

    Returns:
        A scalar; None for no tensors.
    """
    alike: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None and can_be_checked(tensor):
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    norms: list[Tensor] = []
    for (dtype, _), group in alike.items():
        # The norm of half numbers leaves half's range.
        wide = torch.finfo(dtype).bits < 32
        norms += torch._foreach_norm(
            [tensor.float() for tensor in group] if wide else group, 2)
    if not norms:
        return None
    first = norms[0]
    return torch.linalg.vector_norm(torch.stack(norms if len(alike) == 1 else [
        norm.to(first.device, torch.float32) for norm in norms]))


class FillGauge(TorchDispatchMode):
    """Region of a backward in which the largest half number is noted.

    That of gradients: what a checkpointed forward computes again, with
    gradients enabled, is none. Two calls an operation with a half result.

    Attributes:
        filled: That number as a share of the largest of its dtype; one read
            for each device. 0 where nothing was in half.
    """

    def __init__(self) -> None:
        super().__init__()
        self._largest: dict[Any, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any,
                           args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in () if torch.is_grad_enabled() else tree_leaves(out):
            if isinstance(value, Tensor) and value.dtype in (
                    torch.float16, torch.bfloat16) and can_be_checked(value):
                place = value.dtype, value.device
                largest = torch.linalg.vector_norm(value.detach(), math.inf)
                known = self._largest.get(place)
                self._largest[place] = largest if known is None else (
                    torch.maximum(largest, known))
        return out

    @property
    def filled(self) -> float:
        """See the class."""
        return max((float(value) / torch.finfo(dtype).max for (
            dtype, _), value in self._largest.items()), default=0.)


def kind_of(value: float) -> str | None:
    """``nan``, ``inf`` or ``-inf``; None for a finite number."""
    return None if math.isfinite(value) else str(value)


def is_finite(tensor: Tensor) -> bool:
    """Whether all is finite; two reads, and no copy of the tensor.

    True for a dtype that torch cannot tell it of.
    """
    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    for wide in (False, True):
        try:
            # A NaN is both; several times faster than isfinite, also where
            # the dtype has to be another (half on a CPU before torch 2.4).
            low, high = torch.aminmax(value.float() if wide else value)
        except (RuntimeError, NotImplementedError):
            continue
        return bool(math.isfinite(low) and math.isfinite(high))
    return True


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
