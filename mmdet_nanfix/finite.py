"""Finite checks: before a failure without reading, after one by name.

:class:`Anchor` folds "the loss is not finite" into one gradient, so that the
check of the gradients, which an AMP step makes anyway, answers for both. The
other functions read from the device and are meant for after a failure.
"""
import math
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Set

import torch
from torch import Tensor, nn

__all__ = [
    'Anchor', 'bad_tensors', 'flag_of', 'kind_of', 'reached_parameters'
]


def reached_parameters(loss: Tensor) -> Set[int]:
    """``id`` of every leaf that the graph of a loss reaches.

    Walks the autograd graph in Python; no device sync.
    """
    seen = set()
    leaves = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, 'variable', None)
        if leaf is not None:
            leaves.add(id(leaf))
        stack.extend(parent for parent, _ in node.next_functions)
    return leaves


class Anchor:
    """One element of one parameter that carries the state of the loss.

    ``loss - loss`` is 0 where the loss is finite and NaN where it is not.
    Times the anchor element and added to the loss, it makes that one
    gradient element NaN and leaves every other gradient as evidence; a
    healthy gradient is unchanged (``torch.equal``; -0.0 becomes 0.0). No
    device sync.

    Args:
        candidates: Returns the parameters that can carry it, in the order of
            the model.

    Attributes:
        parameter: The one that carries it now.
    """

    def __init__(self,
                 candidates: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._candidates = candidates
        self._chosen: Dict[Any, Optional[nn.Parameter]] = {}
        self.parameter: Optional[nn.Parameter] = None

    def attach(self, loss: Tensor, keys: Hashable = None,
               flag: Optional[Tensor] = None) -> Tensor:
        """Return the loss with the anchor term.

        Args:
            loss: Scalar; returned as it is where no parameter can carry it.
            keys: What tells one graph from another, such as the names of
                its losses: each gets an anchor that it reaches.
            flag: What is told beside the state of the loss: a scalar, 0 or
                NaN.
        """
        if not loss.requires_grad:
            return loss
        parameter = self._chosen.get(keys)
        if parameter is None or not parameter.requires_grad:
            parameter = self._chosen[keys] = self._choose(loss)
        self.parameter = parameter
        if parameter is None:
            return loss
        value = loss.detach()
        value = value - value
        if flag is not None:
            value = value + flag
        element = parameter[(0, ) * parameter.dim()]
        return loss + element.to(loss.dtype) * value.to(loss.dtype)

    def _choose(self, loss: Tensor) -> Optional[nn.Parameter]:
        """The first one-dimensional candidate in the graph of the loss.

        One dimension, because such gradients are dense and have one memory
        layout; in the graph, because a gradient of its own would let
        weight decay and momentum move a parameter that is not in use. The
        first is deepest in the backbone, which every forward uses.
        """
        reached = reached_parameters(loss)
        usable = [
            parameter for parameter in self._candidates()
            if id(parameter) in reached and parameter.requires_grad
            and parameter.numel() and parameter.is_floating_point()
            and parameter.layout == torch.strided
        ]
        flat = [parameter for parameter in usable if parameter.dim() == 1]
        return next(iter(flat or usable), None)

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


def bad_tensors(tensors: Sequence[Optional[Tensor]]) -> List[int]:
    """Indices of the tensors that hold a NaN or an infinity.

    One read from each device. The infinity norm propagates both and, unlike
    a sum, cannot overflow by itself.

    Args:
        tensors: Of any shape, layout and floating dtype; None, empty and
            other dtypes count as finite.
    """
    index = []
    values = []
    for i, tensor in enumerate(tensors):
        if tensor is None or not tensor.is_floating_point():
            continue
        value = _values(tensor)
        if value.numel():
            index.append(i)
            values.append(value)
    if not values:
        return []
    norms = torch._foreach_norm(values, math.inf)
    flags = torch.stack([norm.double().to('cpu') for norm in norms])
    return [i for i, ok in zip(index, torch.isfinite(flags).tolist())
            if not ok]


def flag_of(tensors: Sequence[Tensor], device: torch.device
            ) -> Optional[Tensor]:
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


def kind_of(value: float) -> Optional[str]:
    """``nan``, ``inf`` or ``-inf``; None for a finite number."""
    return None if math.isfinite(value) else str(value)
