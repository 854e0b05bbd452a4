"""Searches whose replays are played by a test."""
from __future__ import annotations

from mmdet_nanfix.diagnosis.findings import Failure, Findings, ReplayResult
from mmdet_nanfix.diagnosis.replay.culprit import CulpritSearch
from mmdet_nanfix.diagnosis.replay.op_record import CallSite, OpRecord
from mmdet_nanfix.diagnosis.replay.origin import find_origins, select_origin


def failing(how, *origins, raised=None, **settings):
    """A replay that fails, or does not."""
    how = Failure(how) if how else None
    return ReplayResult(how, list(origins), raised=raised or (
        'E' if how is Failure.RAISED else None), **settings)


def play(search, first, answer):
    """Play the part of the replays.

    Args:
        search: What asks for them.
        first: Result of the first.
        answer: Takes a request, returns what fails, or a result.

    Returns:
        The requests but for the first.
    """
    requests = []
    try:
        assert next(search).probe
        request = search.send(first)
        while True:
            requests.append(request)
            result = answer(request)
            if not isinstance(result, ReplayResult):
                result = ReplayResult(Failure(result) if result else None)
            request = search.send(result)
    except StopIteration:
        return requests


def search(view, found, last_good, raised, alone):
    """Origin, image and annotation, without any other experiment."""
    if (yield from find_origins(found, raised)):
        yield from select_origin(found, alone)
        yield from CulpritSearch(view, last_good, 3, found, alone).go()


def walk(view, answer, origins=(), last_good=None, failed='loss',
         first=None, raised=None, alone=True):
    """Search a batch; returns findings and requests."""
    first = first or failing(failed, *origins)
    found = Findings()
    return found, play(search(view, found, last_good, raised or first.raised,
                              alone), first, answer)


def record(index, op='op', **settings):
    return OpRecord(index, op, **{'site': CallSite(), **settings})
