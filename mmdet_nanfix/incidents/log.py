"""Append incidents to a log file, and read such files.

One incident is one JSON object on one line of ``incidents.jsonl``.
"""
from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, Callable, Iterator

from .records import SCHEMA, Incident

__all__ = ['IncidentLog', 'log_name', 'read_log']

# Keys that came later: a log without them is read all the same.
_ADDED = {'error', 'ranks', 'origin', 'replay', 'remedy'}
_KEYS = {field.name for field in dataclasses.fields(Incident)} - _ADDED
_OBJECTS = ('where', 'heads', 'loss_scale', 'counts')


def log_name(rank: int) -> str:
    """File name of one rank's log."""
    return 'incidents.jsonl' if rank == 0 else f'incidents_rank{rank}.jsonl'


class IncidentLog:
    """Appends incidents to a file and never stops training.

    Each incident is one ``write`` of one whole line, so that a killed
    process loses at most the line that it was writing. A log that ends in a
    torn line is continued on a fresh one.

    Args:
        folder: Where the file is to be, ``incidents.jsonl`` or that of the
            rank; the folder is made. None keeps no log.
        rank: Process of a distributed run.
        warn: Called once, with one sentence, when the file cannot be
            written.

    Attributes:
        path: The file, or None.
        writable: Whether the last write succeeded.
    """

    def __init__(self, folder: str | None, rank: int,
                 warn: Callable[[str], None]) -> None:
        self.path = None if folder is None else os.path.join(
            folder, log_name(rank))
        self.writable = False
        self._warn: Callable[[str], None] | None = warn
        if folder is not None:
            self._append('')

    def write(self, incident: Incident) -> None:
        """Append one incident."""
        if self.path is not None:
            self._append(incident.to_json() + '\n')

    def _append(self, text: str) -> None:
        path = str(self.path)
        try:
            os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
            with open(path, 'ab+', buffering=0) as file:
                data = text.encode()
                if data and _torn(file):
                    data = b'\n' + data
                if file.write(data) != len(data):
                    raise OSError('the file system is full')
        except OSError as error:
            self.writable = False
            if self._warn is not None:
                self._warn(f'cannot write the incident log {path} ({error}); '
                           'training goes on, incidents appear on the console '
                           'only')
            self._warn = None
        else:
            self.writable = True


def _torn(file: Any) -> bool:
    """Whether a file ends inside a line."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return False
    file.seek(size - 1)
    return file.read(1) != b'\n'


def read_log(path: str) -> Iterator[dict[str, Any]]:
    """Incidents of a log file as dicts.

    Passes over a torn line, and anything else that is not an incident of
    this schema.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, 'rb') as file:
        for line in file:
            try:
                incident = json.loads(line, parse_constant=_refuse)
            except (ValueError, RecursionError):
                continue
            if isinstance(incident, dict) and incident.get(
                    'schema') == SCHEMA and incident.keys() >= _KEYS and all(
                        isinstance(incident[key], (dict, type(None)))
                        for key in _OBJECTS):
                yield incident


def _refuse(constant: str) -> None:
    raise ValueError(f'{constant} is no strict JSON')
