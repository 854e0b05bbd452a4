"""Check tensors for NaN and infinities, and measure their norm."""
from __future__ import annotations

import math
from typing import Any, Iterable, Sequence

import torch
from torch import Tensor, nn

from ...torch_support import HALVES

__all__ = [
    'bad_tensors', 'by_kind', 'can_be_checked', 'flag_of', 'is_finite',
    'norm_of'
]


_CHECKED = (*HALVES, torch.float32, torch.float64)


def can_be_checked(tensor: Tensor) -> bool:
    """Whether a tensor has values whose infinity norm torch can take."""
    return (tensor.dtype in _CHECKED and not nn.parameter.is_lazy(tensor)
            and tensor.layout == torch.strided and tensor.numel() > 0
            and tensor.device.type != 'meta')


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


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype and device, as fused calls take them."""
    alike: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(alike.values())


def flag_of(alike: Sequence[Sequence[Tensor]], device: torch.device
            ) -> Tensor | None:
    """0 where all tensors are finite and NaN where one is not.

    Four calls for each dtype and device, no device sync.

    Args:
        alike: Of :func:`by_kind`: floating, not empty.
        device: Where the answer is needed.

    Returns:
        A scalar; None for no tensors.
    """
    flags = []
    for tensors in alike:
        norms = torch.stack(torch._foreach_norm(tensors, math.inf))
        flag = (norms - norms).sum()
        flags.append(flag if flag.device == device else flag.to(device))
    return sum(flags[1:], flags[0]) if flags else None


def norm_of(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """L2 norm of all tensors together, in fp32; no device sync.

    Three calls for tensors of one dtype and device; strided tensors only.

    Returns:
        A scalar; None for no tensors.
    """
    alike = by_kind(tensor for tensor in tensors
                    if tensor is not None and can_be_checked(tensor))
    norms: list[Tensor] = []
    for group in alike:
        # The norm of half numbers leaves half's range.
        wide = torch.finfo(group[0].dtype).bits < 32
        norms += torch._foreach_norm(
            [tensor.float() for tensor in group] if wide else group, 2)
    if not norms:
        return None
    first = norms[0]
    return torch.linalg.vector_norm(torch.stack(norms if len(alike) == 1 else [
        norm.to(first.device, torch.float32) for norm in norms]))


def is_finite(tensor: Tensor) -> bool:
    """Whether all is finite; one read, and no copy of the tensor.

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
        return float((low - low) + (high - high)) == 0
    return True
