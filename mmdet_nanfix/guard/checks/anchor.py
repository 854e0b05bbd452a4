"""Fold "the loss is not finite" into one gradient, without a read.

The check of the gradients, which an AMP step makes anyway, then answers for
losses and buffers too.
"""
from __future__ import annotations

from typing import Any, Callable, Collection, Iterator, Mapping, Sequence

from torch import Tensor

from ...torch_support import walk
from .finite import bad_tensors, can_be_checked

__all__ = ['Anchor', 'leaves_of', 'loss_terms', 'nodes_of']


def loss_terms(losses: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Loss keys with their tensors, as MMEngine sums them.

    Args:
        losses: What ``forward(mode='loss')`` returns: a tensor or a list of
            tensors by key. Keys without ``loss`` are metrics and left out.
    """
    terms = {}
    for key, value in losses.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if 'loss' in key and values and all(
                isinstance(item, Tensor) for item in values):
            terms[key] = values
    return terms


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """Nodes of the autograd graph of a loss, the nearest first."""
    return walk([] if loss.grad_fn is None else [loss.grad_fn], lambda node: [
        parent for parent, _ in node.next_functions if parent is not None],
        nearest_first=True)


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Leaves that the graph of a loss reaches, the nearest first.

    Walks the autograd graph in Python; no device sync.
    """
    for node in nodes_of(loss):
        leaf = getattr(node, 'variable', None)
        if leaf is not None:
            yield leaf


class Anchor:
    """One element of one parameter that carries the state of the loss.

    ``loss - loss`` is 0 where the loss is finite and NaN where it is not.
    Times the anchor element and added to the loss, it makes that one
    gradient element NaN and leaves every other gradient as evidence; a
    healthy gradient is unchanged (``torch.equal``; -0.0 becomes 0.0). No
    device sync.

    Args:
        candidates: Returns the ``id`` of each parameter that can carry it.
        sharded: Parameters are shards, none of which can.

    Attributes:
        parameter: The one that carries it now.
        flag: 0 or NaN for the losses so far, where no parameter carries
            their state.
    """

    def __init__(self, candidates: Callable[[], Collection[int]],
                 sharded: bool = False) -> None:
        self._candidates = candidates
        self._sharded = sharded
        self.parameter: Tensor | None = None
        self.flag: Tensor | None = None

    def carry(self, loss: Tensor, flags: Sequence[Tensor | None] = (),
              must_attach: bool = False) -> Tensor:
        """Return what to call ``backward`` on; no device sync.

        Args:
            loss: Scalar.
            flags: What is told beside its state: scalars, 0 or NaN.
            must_attach: Never leave it to :attr:`flag`, of which other
                processes would not know.
        """
        told = [flag.to(loss.device) for flag in flags if flag is not None]
        flag = sum(told[1:], told[0]) if told else None
        if not self._sharded:
            attached = self.attach(loss, flag)
            if self.parameter is not None or must_attach:
                return attached
        # Nothing can carry it: a model of shards, or one whole forward of
        # which is within a reentrant checkpoint.
        value = loss.detach()
        for known in (self.flag, flag):
            value = value if known is None else value + known
        self.flag = value - value
        return loss

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
