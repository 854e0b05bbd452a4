"""The last accepted steps, in a few numbers each.

What shows whether a training had left its way before a step failed: losses,
gradient norm and learning rate. Kept on the device; read after a failure.
"""
from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .checks.finite import bad_tensors, can_be_checked, norm_of

__all__ = ['History']

_LENGTH = 50
_EVERY = 10
_OFTEN, _NORM_EVERY = 20, 4
#: Fewer steps tell nothing of a trend.
LEAST = 4
#: A step is absurd whose gradients are longer than any of late by this.
ABSURD = 10.


class History:
    """Losses, gradient norms and learning rates of the last accepted steps.

    Made when the training begins: reads the length of the weights once. A
    healthy step costs a ``detach``, in every tenth one for each loss term.
    Where its gradient norm is not known anyway, that is measured in the
    first twenty steps and then in every fourth: a pass over the gradients.
    No device sync.

    Args:
        optimizer: Whose steps they are.

    Attributes:
        weight_norm: L2 norm of all finite weights when the training began.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._count = 0
        self._totals: deque[Tensor] = deque(maxlen=_LENGTH)
        self._losses: deque[dict[str, list[Tensor]]] = deque(maxlen=_LENGTH)
        self._norms: deque[Any] = deque(maxlen=_LENGTH)
        self._rate = math.nan
        self.weight_norm = self._weight_norm()

    @property
    def is_due(self) -> bool:
        """Whether the gradient norm of the coming step is to be measured."""
        return self._count < _OFTEN or self._count % _NORM_EVERY == 0

    def measure(self) -> Tensor | None:
        """Norm of the gradients that are there now, unscaled; no sync."""
        return norm_of([
            parameter.grad for group in self._optimizer.param_groups
            for parameter in group['params']])

    def accept(self, norm: Any, total: Tensor | None = None,
               losses: Mapping[str, Sequence[Tensor]] | None = None
               ) -> None:
        """Take in a step.

        Args:
            norm: Of its gradients before clipping: a float, a scalar, or
                None.
            total: Its loss, or None where that is not known.
            losses: Terms by key.
        """
        if total is not None:
            self._totals.append(total.detach())
        if losses and self._count % _EVERY == 0:
            self._losses.append({key: [
                # A map of losses would be kept as a whole.
                term.detach() if term.numel() == 1 else term.detach().mean()
                for term in terms] for key, terms in losses.items()})
        self._count += 1
        if norm is not None:
            self._norms.append(norm)
        self._rate = self.learning_rate

    @property
    def learning_rate(self) -> float:
        """The largest of the optimizer now."""
        return max((float(group.get('lr', math.nan))
                    for group in self._optimizer.param_groups),
                   default=math.nan)

    def norms(self) -> list[float]:
        """Of the last steps, the oldest first; one read for each device."""
        known = [norm if isinstance(norm, Tensor) else torch.tensor(
            float(norm)) for norm in self._norms]
        if not known:
            return []
        first = known[-1].device
        values = torch.stack([norm.detach().to(first, torch.float64)
                              for norm in known]).tolist()
        # Finite gradients may be too long for fp32, and a step may have
        # none: they are no measure.
        return [value for value in values if 0 < value < math.inf]

    def totals(self) -> list[float]:
        """Losses of the last steps, the oldest first; one read."""
        return _read(self._totals)

    @property
    def last_rate(self) -> float:
        """Learning rate of the last accepted step."""
        return self._rate

    @property
    def largest(self) -> float | None:
        """The largest gradient norm of late; None where there was none."""
        return max(self.norms(), default=None)

    @property
    def usual(self) -> float | None:
        """Their median; None where there was none."""
        norms = self.norms()
        return statistics.median(norms) if norms else None

    def usual_loss(self, key: str) -> float | None:
        """Median of a loss, seen every tenth step; None for too few."""
        sums = [torch.stack([term.float().reshape(()) for term in terms[key]]
                            ).sum() for terms in self._losses if key in terms]
        values = [abs(value) for value in _read(sums)]
        return statistics.median(values) if len(values) >= LEAST else None

    def sane(self, norm: float) -> bool | None:
        """Whether a gradient norm is one to step on.

        Args:
            norm: Unscaled.

        Returns:
            None where there was none before to compare it with.
        """
        largest = self.largest
        return None if largest is None else norm <= ABSURD * largest

    def _weight_norm(self) -> float:
        """L2 norm of all finite weights; reads from the device."""
        weights = [parameter.detach()
                   for group in self._optimizer.param_groups
                   for parameter in group['params']
                   if can_be_checked(parameter)]
        bad = set(bad_tensors(weights))
        norm = norm_of([weight for index, weight in enumerate(weights)
                        if index not in bad])
        return 0. if norm is None else float(norm)

    @property
    def _adapts(self) -> bool:
        """Whether each weight moves by the learning rate."""
        return any('betas' in group for group in self._optimizer.param_groups)

    def last_update(self) -> float | None:
        """About how far the last accepted step moved all weights."""
        norms = self.norms()
        if math.isnan(self._rate) or not norms:
            return None
        if self._adapts:
            count = sum(parameter.numel()
                        for group in self._optimizer.param_groups
                        for parameter in group['params'])
            return self._rate * math.sqrt(count)
        return self._rate * norms[-1]

    def safe_rate(self) -> float | None:
        """A learning rate whose step is a hundredth of the weights."""
        update = self.last_update()
        if not update or not math.isfinite(update):
            return None
        rate = self._rate * min(1., 0.01 * self.weight_norm / update)
        if not 0 < rate < self._rate:
            return None
        power = 10. ** math.floor(math.log10(rate))
        return float(f'{math.floor(rate / power) * power:.6g}')

    def state_dict(self) -> dict[str, float]:
        """``nanfix_grad_norm``, the largest of late; reads the device."""
        return {'nanfix_grad_norm': self.largest or 0.}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load it; what is missing is 0: nothing is known."""
        self._totals.clear()
        self._losses.clear()
        self._norms.clear()
        known = float(state.get('nanfix_grad_norm', 0.))
        if known > 0 and math.isfinite(known):
            # One among the last: it is forgotten like them.
            self._norms.append(known)


def _read(scalars: Iterable[Tensor]) -> list[float]:
    """Together: each by itself would be a read."""
    known = [value.float().mean() for value in scalars]
    return torch.stack(known).tolist() if known else []
