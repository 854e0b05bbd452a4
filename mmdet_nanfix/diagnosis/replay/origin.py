"""Find the origins of a failure, and select the one to tell of.

Nothing is blamed that a replay has not shown: an operation, because
non-finite numbers went from it to the loss. A search asks for one replay
after the other and runs none itself, so that several processes keep step.
"""
from __future__ import annotations

from typing import Any, Sequence

from ..findings import (
    Asking,
    Failure,
    Findings,
    ReplayResult,
    ReplayStatus,
)
from .op_record import OpRecord
from .request import Place, ReplayRequest

__all__ = ['find_origins', 'select_origin']


def find_origins(found: Findings, raised: str | None) -> Asking[bool]:
    """Find the origins of a failure, in one replay.

    Args:
        found: Is filled in.
        raised: Type of the exception that the step has raised, if any.

    Returns:
        Whether the failure came again.
    """
    result = yield ReplayRequest(probe=True)
    found.result, found.failed = result, result.failed
    found.replay = _no_failure(result, raised)
    if result.error is None:
        found.status = (ReplayStatus.NOT_REPRODUCED if found.replay
                        else ReplayStatus.REPRODUCED)
    return found.replay is None


def _no_failure(result: ReplayResult, raised: str | None) -> str | None:
    """Why the first replay is none of the failure, in words, or None."""
    if result.error is not None:
        return f'the replay {result.error}'
    if result.failed is None:
        return 'the failure did not come again in a replay'
    if result.failed == Failure.RAISED and result.raised != raised:
        return f'the replay raised {result.raised}'
    return None


def select_origin(found: Findings, trials: bool) -> Asking[None]:
    """Select the origin: the first without which the failure is cured.

    For an exception even of one: that something bad was at hand where it was
    raised is no proof. What was given that way cannot be tried, and comes
    after what can.

    Args:
        found: Is filled in.
        trials: Whether to try; else the first is taken.
    """
    result = found.result
    if result is None:
        return
    places: dict[Any, OpRecord] = {}
    for record in result.origins:
        # A layer that is shared by levels is one place.
        places.setdefault((*_place(record), record.given), record)
    firsts = list(places.values())
    tried = [record for record in firsts if record.seen and not record.given]
    raised = result.failed == Failure.RAISED
    if trials and tried and (raised or len(firsts) > 1):
        proven = yield from _tried(tried, result, found)
        if proven is not None:
            firsts.remove(proven)
            firsts.insert(0, proven)
        elif raised:
            firsts = [first for first in firsts if first.given]
    if firsts:
        found.origin, found.others = firsts[0], firsts[1:6]
    elif not raised:
        found.replay = 'no operation made it of what was finite'


def _tried(records: list[OpRecord], first: ReplayResult, found: Findings
           ) -> Asking[OpRecord | None]:
    """The origin without which the failure is cured, or none.

    All together at first: what does not help then does not help alone.
    """

    def helps(group: Sequence[OpRecord]) -> Asking[tuple[bool, ReplayResult]]:
        found.trials += 1
        result = yield ReplayRequest(mended=frozenset(
            map(_place, group)), until=first.failed)
        cured = result.is_past(first)
        if cured:
            names = dict.fromkeys(record.op for record in group[:3])
            found.tests.append(f'with the result of {" and ".join(names)} '
                               'set to 0 it does not come')
        return cured, result

    cured, result = yield from helps(records)
    if not cured:
        # What was bad before may now be an origin.
        known = set(map(_place, records))
        more = [record for record in result.origins if record.seen
                and not record.given and _place(record) not in known]
        if more:
            cured, _ = yield from helps([*records, *more])
        return records[0] if cured else None
    for record in records[:2] if len(records) > 1 else []:
        cured, _ = yield from helps([record])
        if cured:
            return record
    return records[0]


def _place(record: OpRecord) -> Place:
    return record.op, record.site.source
