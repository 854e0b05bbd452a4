"""The last accepted steps, in a few numbers each.

What shows whether a training had left its way before a step failed: losses,
gradient norm and learning rate. Kept on the device; read after a failure.
"""
from __future__ import annotations

import math
import statistics
from collections import deque
from typing import (
    Any,
    Iterable,
    Mapping,
    Sequence,
)

import torch
from torch import Tensor, nn

from .causes import GROWTH, SHARE, Reading
from .finite import bad_tensors, can_be_checked, norm_of

__all__ = ['History']

_LENGTH = 50
_EVERY = 10
_OFTEN, _NORM_EVERY = 20, 4
# Fewer tell nothing of a trend.
_LEAST = 4
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
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._count = 0
        self._totals: deque[Tensor] = deque(maxlen=_LENGTH)
        self._losses: deque[dict[str, list[Tensor]]] = deque(maxlen=_LENGTH)
        self._norms: deque[Any] = deque(maxlen=_LENGTH)
        self._rate = math.nan
        self._weights = self._weight_norm()

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
        values = [abs(value) for value in self._read(sums)]
        return statistics.median(values) if len(values) >= _LEAST else None

    def sane(self, norm: float) -> bool | None:
        """Whether a gradient norm is one to step on.

        Args:
            norm: Unscaled.

        Returns:
            None where there was none before to compare it with.
        """
        largest = self.largest
        return None if largest is None else norm <= ABSURD * largest

    def readings(self, model: nn.Module) -> dict[str, Reading]:
        """What the history and the optimizer say; reads from the device.

        Args:
            model: Whose weights they are.
        """
        return {'moments': self._moments(model), 'eps': self._eps(),
                'update': self._update(), 'growth': self._growth()}

    def _moments(self, model: nn.Module) -> Reading:
        names = {id(parameter): name
                 for name, parameter in model.named_parameters()}
        held = [(f'{key} of {names.get(id(parameter), "a parameter")}', value)
                for parameter, state in self._optimizer.state.items()
                for key, value in state.items() if isinstance(value, Tensor)]
        bad = bad_tensors([value for _, value in held])
        kind = type(self._optimizer).__name__
        if bad:
            return Reading(True, f"{kind}'s {held[bad[0]][0]} is not finite"
                           + (f', and {len(bad) - 1} more' if len(bad) > 1
                              else ''))
        return Reading(False, f"all of {kind}'s state is finite" if held
                       else f'{kind} keeps no state')

    def _eps(self) -> Reading:
        for group in self._optimizer.param_groups:
            eps = group.get('eps')
            for parameter in group['params'] if eps is not None else ():
                if float(torch.tensor(eps, dtype=parameter.dtype)) == 0:
                    return Reading(True, (
                        f'eps {eps:g} is 0 in '
                        f'{str(parameter.dtype)[len("torch."):]}: an update '
                        'without a gradient is 0 / 0'))
        return Reading(False, 'eps is not 0')

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

    def _update(self) -> Reading:
        update = self.last_update()
        if update is None:
            return Reading(False, 'no step was accepted yet')
        return Reading(update > SHARE * self._weights, (
            f'the last step moved the weights by about {update:.3g} (learning'
            f' rate {self._rate:.3g}, gradient norm {self.norms()[-1]:.3g}); '
            f'at the start they were {self._weights:.3g} long'))

    def _growth(self) -> Reading:
        grown = {'total loss': self._read(self._totals),
                 'gradient norm': self.norms()}
        for name, values in grown.items():
            finite = [value for value in values if math.isfinite(value)]
            if len(finite) < _LEAST:
                continue
            usual, last = statistics.median(finite[:-1]), finite[-1]
            # A loss may be below 0: then it is no length.
            if usual > 0 and last > GROWTH * usual:
                return Reading(True, (
                    f'the {name} went from {usual:.3g} to {last:.3g} within '
                    f'{len(finite)} accepted steps'))
        return Reading(False, 'losses and gradient norm had not grown')

    @staticmethod
    def _read(scalars: Iterable[Tensor]) -> list[float]:
        """Together: each by itself would be a read."""
        known = [value.float().mean() for value in scalars]
        return torch.stack(known).tolist() if known else []

    def safe_rate(self) -> float | None:
        """A learning rate whose step is a hundredth of the weights."""
        update = self.last_update()
        if not update or not math.isfinite(update):
            return None
        rate = self._rate * min(1., 0.01 * self._weights / update)
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
