"""Describe what happened: incidents, their log file, and words for them.

Knows neither torch nor a host: logs are read on any machine.

=============  ============================================================
``records``    the incident and its parts
``codes``      cause codes, NF101 to NF113, with their titles
``log``        the append-only log file, and its reader
``text``       one line and one paragraph about an incident; the table at the
               end of a run
=============  ============================================================
"""
from __future__ import annotations

from .log import IncidentLog, read_log
from .records import (
    Cause,
    Counts,
    HeadState,
    Incident,
    LossScaleChange,
    NonFiniteError,
    Where,
    short_source,
)
from .text import IncidentText, Summary

__all__ = [
    'Cause', 'Counts', 'HeadState', 'Incident', 'IncidentLog',
    'IncidentText', 'LossScaleChange', 'NonFiniteError', 'Summary', 'Where',
    'read_log', 'short_source'
]
