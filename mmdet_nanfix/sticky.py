"""Which parts of a model stay in fp32, as plain logic."""
from typing import Any, Dict, List, Mapping, Sequence

__all__ = ['StickyParts']


class StickyParts:
    """Which parts of a model stay in fp32, since that has saved steps.

    Args:
        given: Those that are in fp32 from the start.
        times: So many saved steps make a part stay so.
        within: Within so many iterations.

    Attributes:
        names: Parts that stay in fp32.
    """

    def __init__(self, given: Sequence[str] = (), times: int = 3,
                 within: int = 1000) -> None:
        self.names: List[str] = list(given)
        self._times, self._within = times, within
        self._saved: Dict[str, List[int]] = {}

    def save(self, name: str, iteration: int) -> bool:
        """Take in a step that was saved by having a part in fp32.

        Returns:
            Whether it stays so from now on.
        """
        saved = [*self._saved.get(name, ()), iteration][-self._times:]
        self._saved[name] = saved
        if name in self.names or len(saved) < self._times or (
                iteration - saved[0] >= self._within):
            return False
        self.names.append(name)
        return True

    def state_dict(self) -> Dict[str, int]:
        """Plain numbers, the names in the keys.

        ``nanfix_fp32/<part>`` is 1 for what stays in fp32, and
        ``nanfix_fp32_saved/<n>/<part>`` the iteration of a saved step.
        """
        state = {f'nanfix_fp32/{name}': 1 for name in self.names}
        for name, saved in self._saved.items():
            state.update({f'nanfix_fp32_saved/{index}/{name}': iteration
                          for index, iteration in enumerate(saved)})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what stays in fp32, beside what the config says."""
        saved: Dict[str, Dict[int, int]] = {}
        for key, value in state.items():
            kind, _, name = str(key).partition('/')
            if kind == 'nanfix_fp32' and name not in self.names:
                self.names.append(name)
            elif kind == 'nanfix_fp32_saved':
                index, _, name = name.partition('/')
                saved.setdefault(name, {})[int(index)] = int(value)
        self._saved = {name: [found[index] for index in sorted(found)]
                       for name, found in saved.items()}
