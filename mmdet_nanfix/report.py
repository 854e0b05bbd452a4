"""The incidents of a work directory as a table.

``python -m mmdet_nanfix.report WORK_DIR`` reads the logs of all resumes and
ranks. Exit status: 0 no incident, 1 some, 2 misuse.
"""
from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from typing import (
    Any,
    Iterable,
    Iterator,
    NoReturn,
    Sequence,
)

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .records import Incident, read_log
from .wording import head_in_words, heads_told, paragraph, scale_in_words

__all__ = ['Summary', 'find_logs', 'incident_table', 'main', 'paragraphs']

_ACTIONS = {'rescued_fp32_head': 'in fp32'}
_LOG = re.compile(r'incidents(_rank\d+)?\.jsonl')


class _Parser(argparse.ArgumentParser):
    """Misuse is one line on stderr and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong without the usage block."""
        self.exit(2, f'nan_report: {message}\n')


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
    for name, state in heads_told(incident).items():
        said = head_in_words(state)
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
        Text(scale_in_words(incident)),
        Text(_ACTIONS.get(str(incident['action']), str(incident['action']))
             + f'\n{counts.get("consecutive")} in a row\n'
             f'{counts.get("total")} in all'),
    ]


def incident_table(incidents: Iterable[dict[str, Any]], title: str) -> Table:
    """One row an incident.

    Args:
        incidents: As :func:`~mmdet_nanfix.records.read_log` gives them.
        title: Printed above the table.
    """
    table = Table('iter', 'phase', 'heads', 'loss scale', 'action',
                  title=Text(title), title_justify='left', show_lines=True)
    for incident in incidents:
        table.add_row(*_row(incident))
    return table


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


def paragraphs(incidents: Iterable[dict[str, Any]]) -> Iterator[str]:
    """One paragraph for each place where incidents began.

    Args:
        incidents: As :func:`~mmdet_nanfix.records.read_log` gives them.
    """
    alike: dict[str, list[dict[str, Any]]] = {}
    for incident in incidents:
        place = {**(incident['where'] or {}), 'kind': None}
        cause = _as_dict(incident['cause']).get('code')
        alike.setdefault(json.dumps([
            place, cause, incident['action'], incident['images'] or None],
            sort_keys=True), []).append(incident)
    for first, *others in alike.values():
        text = paragraph(first)
        if others:
            more = ', '.join(str(other['iter']) for other in others[:8])
            text += f'\n  The same at iter {more}' + (
                f' and {len(others) - 8} more.' if len(others) > 8 else '.')
        yield text


def _print_report(work_dir: str, logs: Sequence[str],
                  console: Console) -> int:
    total = 0
    for path in logs:
        incidents = list(read_log(path))
        total += len(incidents)
        if incidents:
            console.print(incident_table(
                incidents, title=os.path.relpath(
                    path, os.path.abspath(work_dir))))
            for text in paragraphs(incidents):
                # Filled already; a patch must stay as it is.
                console.print(Text(text), soft_wrap=True)
                console.print()
    if not logs:
        console.print(f'No incident log under {work_dir}: no protected run '
                      'has written there.', markup=False)
    elif total == 0:
        console.print(f'No incident in {len(logs)} log(s) under {work_dir}.',
                      markup=False)
    else:
        console.print(f'{total} incident(s) in {len(logs)} log(s) under '
                      f'{work_dir}.', markup=False)
    return total


def _print_json(logs: Sequence[str]) -> int:
    found = [{'log': path, **incident}
             for path in logs for incident in read_log(path)]
    for finding in found:
        print(json.dumps(finding, allow_nan=False, ensure_ascii=False))
    return len(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = _Parser(prog='nan_report', description=__doc__.split('\n')[0])
    parser.add_argument('work_dir', help='work directory of a training run')
    parser.add_argument('--json', action='store_true',
                        help='one JSON object a line, with its log file')
    args = parser.parse_args(argv)
    if not os.path.isdir(args.work_dir):
        parser.error(f'{args.work_dir} is not a directory; give the work '
                     'directory of a training run')
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names may hold what the terminal's encoding does not.
        sys.stdout.reconfigure(errors='backslashreplace')
    try:
        logs = find_logs(args.work_dir)
        if args.json:
            total = _print_json(logs)
        else:
            total = _print_report(args.work_dir, logs, Console())
    except BrokenPipeError:
        # The reader of a pipe (head, less) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        parser.error(f'{error.filename or "standard output"}: '
                     f'{error.strerror}')
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        parser.error(f'a log under {args.work_dir} holds an incident that '
                     f'cannot be shown ({error}); --json prints it as it is')
    return 1 if total else 0


if __name__ == '__main__':
    sys.exit(main())
