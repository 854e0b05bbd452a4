"""Which buffers of a model must stay finite, and which hold infinities.

A step can have finite losses and gradients and still have poisoned BatchNorm
statistics, so that buffers are watched as losses are. Some hold infinities
on purpose: attention masks, the best score so far.
"""
from __future__ import annotations

import operator
from itertools import chain
from typing import Any, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..checks.finite import bad_tensors, by_kind, can_be_checked, flag_of

__all__ = ['WatchedBuffers']

Place = Tuple[int, str]


class WatchedBuffers:
    """The buffers of a model that are expected to stay finite.

    Those that are not finite at the start are exempt, and so are those that
    every forward fills with infinities: bad in two steps in a row while
    losses and gradients are finite. A statistic that overflowed is bad after
    one batch. Never exempt are normalization layers, and modules with a NaN
    among their buffers.

    Args:
        model: The bare model. One read from the device.

    Attributes:
        exempt: Names of the buffers that are not watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.exempt: set[str] = set()
        self._exempt_places: set[Place] = set()
        self._suspects: set[str] = set()
        self._every: list[Any] = []
        self._alike: list[list[Tensor]] = []
        self._let_go(self.bad())

    def _let_go(self, names: Sequence[str]) -> None:
        self.exempt.update(names)
        self._every = []
        for name in names:
            owner, _, own = name.rpartition('.')
            module = self._model.get_submodule(owner)
            self._exempt_places.add((id(module._buffers), own))

    def watched(self) -> dict[str, Tensor]:
        """Those that must stay finite, by name."""
        return {name: buffer for name, buffer in self._model.named_buffers()
                if can_be_checked(buffer) and name not in self.exempt}

    def flag(self, buffers: Sequence[dict[str, Any]],
             device: torch.device) -> Tensor | None:
        """0 where the watched ones are finite, else NaN; no device sync.

        Args:
            buffers: Of :meth:`.Transaction.buffers`.
            device: Where the answer is needed.
        """
        every = list(chain.from_iterable(map(dict.values, buffers)))
        if len(every) != len(self._every) or not all(
                map(operator.is_, every, self._every)):
            self._every = every
            self._alike = by_kind(
                buffer for named in buffers for name, buffer in named.items()
                if buffer is not None and can_be_checked(buffer)
                and (id(named), name) not in self._exempt_places)
        return flag_of(self._alike, device)

    def bad(self) -> list[str]:
        """Names of watched buffers that are not finite; one read."""
        watched = self.watched()
        names = list(watched)
        return [names[i] for i in bad_tensors(list(watched.values()))]

    def accept(self) -> None:
        """A step was good: nothing is suspected any more."""
        self._suspects = set()

    def suspect(self, names: Sequence[str]) -> str | None:
        """Take in a step in which nothing but these buffers was bad.

        Returns:
            One sentence where some are exempt from here on.
        """
        watched = self.watched()
        owners = {name: name.rpartition('.')[0] for name in names}
        spoiled = {owner for name, owner in owners.items()
                   if watched[name].isnan().any()}
        meant = [
            name for name, owner in owners.items()
            if name in self._suspects and owner not in spoiled
            and not isinstance(self._model.get_submodule(owner),
                               nn.modules.batchnorm._NormBase)]
        self._suspects = set(names)
        self._let_go(meant)
        if not meant:
            return None
        return (f'buffer {meant[0]} was filled with infinities that look '
                'meant; it is not watched from here on')
