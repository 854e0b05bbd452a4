"""Promote modules that have saved steps to fp32, for the whole run."""
from __future__ import annotations

from typing import Any, Container, Mapping, Sequence

__all__ = ['Fp32Promotions']


class Fp32Promotions:
    """Which parts of a model stay in fp32, since that has saved steps.

    Args:
        given: Those that are in fp32 from the start.
        times: So many saved steps make a part stay so.
        within: Within so many iterations.

    Attributes:
        given: Those of the config.
        promoted: Those that have saved steps.
    """

    def __init__(self, given: Sequence[str] = (), times: int = 3,
                 within: int = 1000) -> None:
        self.given: list[str] = list(given)
        self.promoted: list[str] = []
        self._times, self._within = times, within
        self._saved: dict[str, list[int]] = {}

    @property
    def names(self) -> list[str]:
        """All parts that stay in fp32."""
        return self.given + self.promoted

    def drop_unknown(self, known: Container[str]) -> list[str]:
        """Drop parts of a checkpoint that a model does not have.

        Args:
            known: Those that it has.

        Returns:
            Those that it does not.
        """
        lost = [name for name in self.promoted if name not in known]
        self.promoted = [name for name in self.promoted if name in known]
        return lost

    def record_rescue(self, name: str, iteration: int) -> bool:
        """Take in a step that was saved by having a part in fp32.

        Returns:
            Whether it stays so from now on.
        """
        saved = [*self._saved.get(name, ()), iteration][-self._times:]
        self._saved[name] = saved
        if name in self.names or len(saved) < self._times or (
                iteration - saved[0] >= self._within):
            return False
        self.promoted.append(name)
        return True

    def state_dict(self) -> dict[str, int]:
        """Plain numbers, the names in the keys.

        ``nanfix_fp32/<part>`` is 1 for what was promoted, and
        ``nanfix_fp32_saved/<n>/<part>`` the iteration of a saved step.
        """
        state = {f'nanfix_fp32/{name}': 1 for name in self.promoted}
        for name, saved in self._saved.items():
            state.update({f'nanfix_fp32_saved/{index}/{name}': iteration
                          for index, iteration in enumerate(saved)})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what stays in fp32, beside what the config says."""
        saved: dict[str, dict[int, int]] = {}
        self.promoted = []
        for key, value in state.items():
            kind, _, name = str(key).partition('/')
            if kind == 'nanfix_fp32' and value and name not in self.names:
                self.promoted.append(name)
            elif kind == 'nanfix_fp32_saved':
                index, _, name = name.partition('/')
                saved.setdefault(name, {})[int(index)] = int(value)
        self._saved = {name: [found[index] for index in sorted(found)]
                       for name, found in saved.items()}
