"""Read symptoms off the state of a run, without a replay."""
from __future__ import annotations

import dataclasses
import math
import statistics

import torch
from torch import Tensor

from ...guard import StepParts
from ...guard.checks import bad_tensors

__all__ = ['Symptom', 'Symptoms']

#: Loss or gradient norm against the median of the steps before.
GROWTH = 10.
#: Length of the last update against that of all weights.
SHARE = 0.5
# Fewer steps tell nothing of a trend.
LEAST = 4


@dataclasses.dataclass
class Symptom:
    """What the state of the run says.

    Attributes:
        bad: Whether it is a reason for the failure.
        words: In one clause, with numbers.
    """

    bad: bool
    words: str


class Symptoms:
    """Reads the history of a run and its optimizer; reads from the device.

    Args:
        parts: Of the guarded step.
    """

    def __init__(self, parts: StepParts) -> None:
        self._model = parts.model
        self._optimizer = parts.optimizer
        self._history = parts.history

    def read(self, norm: float | None) -> dict[str, Symptom]:
        """Return ``moments``, ``eps``, ``update``, ``growth``, ``norm``.

        Args:
            norm: Gradient norm of the step that would be saved, unscaled;
                None where there is none.
        """
        found = {'moments': self._moments(), 'eps': self._eps(),
                 'update': self._update(), 'growth': self._growth()}
        return found if norm is None else {**found, 'norm': self._norm(norm)}

    def _norm(self, norm: float) -> Symptom:
        largest = self._history.largest
        if largest is None:
            return Symptom(False, 'no step was accepted before, to compare '
                           f'a gradient norm of {norm:.3g} with')
        return Symptom(self._history.sane(norm) is False, (
            f'a gradient norm of {norm:.3g}, where the largest of the last '
            f'accepted steps is {largest:.3g}'))

    def _moments(self) -> Symptom:
        names = {id(parameter): name
                 for name, parameter in self._model.named_parameters()}
        held = [(f'{key} of {names.get(id(parameter), "a parameter")}', value)
                for parameter, state in self._optimizer.state.items()
                for key, value in state.items() if isinstance(value, Tensor)]
        bad = bad_tensors([value for _, value in held])
        kind = type(self._optimizer).__name__
        if bad:
            return Symptom(True, f"{kind}'s {held[bad[0]][0]} is not finite"
                           + (f', and {len(bad) - 1} more' if len(bad) > 1
                              else ''))
        return Symptom(False, f"all of {kind}'s state is finite" if held
                       else f'{kind} keeps no state')

    def _eps(self) -> Symptom:
        for group in self._optimizer.param_groups:
            eps = group.get('eps')
            for parameter in group['params'] if eps is not None else ():
                if float(torch.tensor(eps, dtype=parameter.dtype)) == 0:
                    return Symptom(True, (
                        f'eps {eps:g} is 0 in '
                        f'{str(parameter.dtype)[len("torch."):]}: an update '
                        'without a gradient is 0 / 0'))
        return Symptom(False, 'eps is not 0')

    def _update(self) -> Symptom:
        history = self._history
        update = history.last_update()
        if update is None:
            return Symptom(False, 'no step was accepted yet')
        return Symptom(update > SHARE * history.weight_norm, (
            f'the last step moved the weights by about {update:.3g} (learning'
            f' rate {history.last_rate:.3g}, gradient norm '
            f'{history.norms()[-1]:.3g}); at the start they were '
            f'{history.weight_norm:.3g} long'))

    def _growth(self) -> Symptom:
        grown = {'total loss': self._history.totals(),
                 'gradient norm': self._history.norms()}
        for name, values in grown.items():
            finite = [value for value in values if math.isfinite(value)]
            if len(finite) < LEAST:
                continue
            usual, last = statistics.median(finite[:-1]), finite[-1]
            # A loss may be below 0: then it is no length.
            if usual > 0 and last > GROWTH * usual:
                return Symptom(True, (
                    f'the {name} went from {usual:.3g} to {last:.3g} within '
                    f'{len(finite)} accepted steps'))
        return Symptom(False, 'losses and gradient norm had not grown')
