"""Measure how far the gradients of a replay fill half's range."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...guard.checks import can_be_checked
from ...torch_support import HALVES, tree_leaves

__all__ = ['FillGauge']


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
                    HALVES) and can_be_checked(value):
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
