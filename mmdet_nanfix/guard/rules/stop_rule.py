"""Decide when to stop: too many skipped optimizer steps."""
from __future__ import annotations

from collections import deque
from typing import Any, Mapping

__all__ = ['StopRule']


class StopRule:
    """When to give up: too many skipped optimizer steps.

    Args:
        max_consecutive: Stop after this many skipped steps in a row. ``None``
            never stops, neither by this rule nor by the next.
        max_recent: Stop when more than this many of the last ``window``
            steps were skipped.
        window: Length of the memory, in optimizer steps.

    Attributes:
        consecutive: Skipped steps since the last good one.
        total: Skipped steps of the whole run.
        steps: Optimizer steps of the whole run, skipped ones included.
        saved: Those that were made again instead of being skipped.

    Raises:
        TypeError: ``max_consecutive`` is neither an int nor None.
        ValueError: ``max_consecutive`` is below 1.
    """

    def __init__(self,
                 max_consecutive: int | None = 20,
                 max_recent: int = 40,
                 window: int = 200) -> None:
        if max_consecutive is not None:
            if isinstance(max_consecutive, bool) or not isinstance(
                    max_consecutive, int):
                raise TypeError('Expected argument `max_consecutive` to be '
                                f'an int or None, but got {max_consecutive!r}')
            if max_consecutive < 1:
                raise ValueError('Expected argument `max_consecutive` to be '
                                 f'at least 1, but got {max_consecutive}')
        self.max_consecutive = max_consecutive
        self.max_recent = max_recent
        self.window = window
        self.consecutive = 0
        self.total = 0
        self.steps = 0
        self.saved = 0
        self._recent: deque[bool] = deque(maxlen=window)

    def update(self, skipped: bool, saved: bool = False) -> str | None:
        """Take in one optimizer step.

        Args:
            skipped: Whether nothing moved.
            saved: Whether it failed, but was made again.

        Returns:
            Why to stop, in words, or None to go on.
        """
        self.steps += 1
        self.saved += saved
        self._recent.append(skipped)
        if not skipped:
            self.consecutive = 0
            return None
        self.consecutive += 1
        self.total += 1
        if self.max_consecutive is None:
            return None
        if self.consecutive >= self.max_consecutive:
            return f'{self.consecutive} optimizer steps in a row were skipped'
        recent = sum(self._recent)
        if recent > self.max_recent:
            return (f'{recent} of the last {len(self._recent)} optimizer '
                    'steps were skipped')
        return None

    def state_dict(self) -> dict[str, int]:
        """``nanfix_`` ``steps``, ``total``, ``consecutive``, ``saved``."""
        return {
            'nanfix_steps': self.steps,
            'nanfix_total': self.total,
            'nanfix_consecutive': self.consecutive,
            'nanfix_saved': self.saved,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counters; names that are missing count from zero."""
        self.steps = int(state.get('nanfix_steps', 0))
        self.total = int(state.get('nanfix_total', 0))
        self.consecutive = int(state.get('nanfix_consecutive', 0))
        self.saved = int(state.get('nanfix_saved', 0))
        self._recent.clear()
