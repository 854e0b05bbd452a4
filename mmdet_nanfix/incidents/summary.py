"""Count incidents for the table at the end of a run."""
from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .records import Incident

__all__ = ['Summary']


class Summary:
    """Incidents counted by phase and head, for the end of a run.

    Attributes:
        rows: ``{(phase, head): [incidents, first iter, last iter]}``.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[int]] = {}

    def add(self, incident: Incident) -> None:
        """Count one incident."""
        key = (incident.where.phase or '?', incident.where.head or '?')
        row = self.rows.setdefault(key, [0, incident.iter, incident.iter])
        row[0] += 1
        row[2] = incident.iter

    def text(self, width: int = 79) -> str:
        """The table as plain text, for a log file."""
        table = Table('phase', 'head', 'incidents', 'first iter', 'last iter')
        for (phase, head), counts in self.rows.items():
            table.add_row(Text(phase), Text(head), *map(str, counts))
        out = io.StringIO()
        Console(file=out, width=width).print(table)
        return out.getvalue().rstrip()
