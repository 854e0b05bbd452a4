"""Find the logs of a work directory, and show incidents as a table."""
from __future__ import annotations

import json
import os
import re
from typing import Any, Iterable, Iterator

from rich.table import Table
from rich.text import Text

from ..incidents import IncidentText

__all__ = ['find_logs', 'incident_table', 'paragraphs']

_ACTIONS = {'rescued_fp32_head': 'in fp32'}
_LOG = re.compile(r'incidents(_rank\d+)?\.jsonl')


def find_logs(work_dir: str) -> list[str]:
    """Incident logs below a directory, oldest run first.

    A run logs to ``<work_dir>/<timestamp>/nanfix``; its folder name sorts
    by time. Links to folders are followed, each folder is read once.
    """
    found = []
    seen = set()
    for folder, subfolders, files in os.walk(os.path.abspath(work_dir),
                                             followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders.sort()
        if os.path.basename(folder) == 'nanfix':
            found += [os.path.join(folder, name) for name in sorted(files)
                      if _LOG.fullmatch(name)]
    return found


def _heads_text(incident: dict[str, Any]) -> Text:
    """One line a head; ``>`` marks the one to blame."""
    text = Text()
    blamed = (incident['where'] or {}).get('head')
    for name, said in IncidentText(incident).heads.items():
        text.append('\n' if text else '')
        text.append('> ' if name == blamed else '  ')
        text.append(f'{name}: ')
        text.append(said, '' if said == 'fine' else 'bold red')
    return text


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _row(incident: dict[str, Any]) -> list[Text]:
    where = incident['where'] or {}
    counts = incident['counts'] or {}
    cause = _as_dict(incident['cause'])
    at = str(incident['iter'])
    if incident['epoch'] is not None:
        at += f'\nepoch {incident["epoch"]}'
    if incident['rank']:
        at += f'\nrank {incident["rank"]}'
    # Text, not str: rich reads markup in a str, and names are not ours.
    return [
        Text(at),
        Text('\n'.join(str(said) for said in (
            where.get('phase'), cause.get('code')) if said)),
        _heads_text(incident),
        Text(IncidentText(incident).scale),
        Text(_ACTIONS.get(str(incident['action']), str(incident['action']))
             + f'\n{counts.get("consecutive")} in a row\n'
             f'{counts.get("total")} in all'),
    ]


def incident_table(incidents: Iterable[dict[str, Any]], title: str) -> Table:
    """One row an incident.

    Args:
        incidents: As :func:`.read_log` gives them.
        title: Printed above the table.
    """
    table = Table('iter', 'phase', 'heads', 'loss scale', 'action',
                  title=Text(title), title_justify='left', show_lines=True)
    for incident in incidents:
        table.add_row(*_row(incident))
    return table


def paragraphs(incidents: Iterable[dict[str, Any]]) -> Iterator[str]:
    """One paragraph for each place where incidents began.

    Args:
        incidents: As :func:`.read_log` gives them.
    """
    alike: dict[str, list[dict[str, Any]]] = {}
    for incident in incidents:
        place = {**(incident['where'] or {}), 'kind': None}
        cause = _as_dict(incident['cause']).get('code')
        alike.setdefault(json.dumps([
            place, cause, incident['action'], incident['images'] or None],
            sort_keys=True), []).append(incident)
    for first, *others in alike.values():
        text = IncidentText(first).paragraph()
        if others:
            more = ', '.join(str(other['iter']) for other in others[:8])
            text += f'\n  The same at iter {more}' + (
                f' and {len(others) - 8} more.' if len(others) > 8 else '.')
        yield text
