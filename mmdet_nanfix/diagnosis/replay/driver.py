"""Make the replays that a search asks for: the same ones on all ranks."""
from __future__ import annotations

from typing import Callable

from ...guard import CapturedForward, StepParts
from ...guard.rules import in_words
from ...guard.state import cuda_devices, has_room
from ..findings import Asking, ReplayResult
from .request import ReplayRequest, can_replay, is_out_of_memory

__all__ = ['MOST', 'ReplayDriver']

#: Replays that are made for one failed forward at most.
MOST = 16

#: Runs one replay.
Run = Callable[[ReplayRequest], ReplayResult]


class ReplayDriver:
    """Drives a search, and makes what it asks for.

    Args:
        parts: Of the guarded step.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._ranks = parts.trainer.ranks

    def why_not(self, forward: CapturedForward | None) -> str | None:
        """Tell why a forward cannot be replayed on all ranks, or None."""
        reason = self._reason(forward)
        # Asked whatever the answer: the others ask too.
        if self._ranks.which(reason is not None):
            return reason or 'another rank cannot'
        return None

    def _reason(self, forward: CapturedForward | None) -> str | None:
        if forward is None:
            return 'no batch was seen'
        if not can_replay():
            return 'this torch is too old for it'
        if not forward.batch.is_restorable:
            return 'the model has written to the batch'
        if not has_room(cuda_devices(self._parts.model)):
            # What runs out of memory may leave too little for the training,
            # and in several processes leaves the others waiting.
            return 'there is not enough memory'
        return None

    def drive(self, search: Asking[None], run: Run) -> None:
        """Make replays until no rank asks for one.

        Args:
            search: What asks for them; it does not raise.
            run: Runs one.
        """
        request = next(search, None)
        for _ in range(MOST):
            ranks = self._ranks.which(request is not None)
            if not ranks:
                return
            asked, mine = self._together(request, ranks[0])
            try:
                result = run(asked)
            except Exception as error:
                # No replay is worth a training, least of all the memory.
                result = ReplayResult(error='ran out of memory' if (
                    is_out_of_memory(error)) else f'raised {in_words(error)}')
            if mine and request is not None:
                try:
                    request = search.send(result)
                except StopIteration:
                    request = None

    def _together(self, request: ReplayRequest | None, first: int
                  ) -> tuple[ReplayRequest, bool]:
        """The replay that all processes make, that of the first that asks.

        Returns:
            It, and whether it is what this process asks for. What is not
            comes in another round.
        """
        if self._ranks.alone:
            return request or ReplayRequest(), True
        own = request.shared() if request is not None else None
        shared = self._ranks.share(own, first)
        if request is not None and own == shared:
            return request, True
        return ReplayRequest(**shared), False
