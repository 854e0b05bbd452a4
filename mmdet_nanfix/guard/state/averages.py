"""Remember what hooks keep of a model: EMA, shadows, mean teachers."""
from __future__ import annotations

from typing import Any, Iterable, Iterator

from torch import Tensor

from .snapshot import Snapshot
from .transaction import TensorBackup

__all__ = ['AveragedModels']


class AveragedModels:
    """What other objects keep of a model: EMA, shadows, mean teachers.

    Their tensors are remembered, and where one has moved, the numbers beside
    it (a count of updates). Nothing else of them is touched: a list that
    has grown is a record, not an average.

    Args:
        roots: Objects that may keep some.
        besides: Objects that are not looked at, such as the model.
    """

    def __init__(self, roots: Iterable[Any],
                 besides: Iterable[Any] = ()) -> None:
        self._roots = list(roots)
        self._besides = list(besides)
        self._snapshots: list[Snapshot] = []
        self._backup = TensorBackup()
        self._keepers: list[Any] = []
        self._looks = 0

    def copy(self, tensors: Iterable[Tensor] = (),
             often: bool = False) -> None:
        """Remember them, and some tensors more.

        Args:
            tensors: The others.
            often: This is done all the time: roots that have held no tensor
                so far are looked at now and then only.
        """
        self._looks += 1
        everywhere = not often or self._looks <= 3 or self._looks % 50 == 0
        roots = self._roots if everywhere else self._keepers
        found = [(root, Snapshot.of([root.__dict__], True, self._besides))
                 for root in roots]
        self._keepers = [root for root, snapshot in found if snapshot.tensors]
        self._snapshots = [snapshot for _, snapshot in found
                           if snapshot.tensors]
        every = {id(tensor): tensor for snapshot in self._snapshots
                 for tensor in snapshot.tensors}
        every.update((id(tensor), tensor) for tensor in tensors)
        self._backup.copy(list(every.values()))

    def restore(self) -> None:
        """Make them what they were; reads from the device."""
        for snapshot in self._snapshots:
            diff = snapshot.diff()
            pairs = list(diff.names)
            for container, held, now in diff.elements:
                pairs.extend(_pairs(container, held, now))
            averages = [pair for pair in pairs if _is_average(*pair[2:])]
            if averages or any(map(self._backup.differs, snapshot.tensors)):
                counts = [pair for pair in pairs
                          if type(pair[2]) in (int, float)]
                for place, key, old, _ in averages + counts:
                    place[key] = old
        self._backup.restore()


def _pairs(container: Any, held: Any, now: Any) -> Iterator[Any]:
    """What a dict or a list of unchanged length has replaced, and where."""
    if len(held) == len(now) and isinstance(container, (dict, list)):
        for key in (held if isinstance(held, dict) else range(len(held))):
            new = now.get(key) if isinstance(now, dict) else now[key]
            if held[key] is not new:
                yield container, key, held[key], new


def _is_average(old: Any, new: Any) -> bool:
    """A tensor, or a dict or list of tensors with as many as before."""
    if isinstance(old, Tensor):
        return True
    if type(new) is not type(old) or not isinstance(old, (dict, list)) or (
            not old or len(new) != len(old)):
        return False
    values = old.values() if isinstance(old, dict) else old
    return all(isinstance(value, Tensor) for value in values)
