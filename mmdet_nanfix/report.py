"""The incidents of a work directory as a table.

``python -m mmdet_nanfix.report WORK_DIR`` reads the logs of all resumes and
ranks. Exit status: 0 no incident, 1 some, 2 misuse.
"""
import argparse
import dataclasses
import io
import json
import os
import re
import sys
from typing import (
    Any,
    Dict,
    Iterable,
    List,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
)

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .records import HeadState, Incident, read_log

__all__ = ['Summary', 'find_logs', 'incident_table', 'main']

_HEAD_KEYS = tuple(field.name for field in dataclasses.fields(HeadState))
_LOG = re.compile(r'incidents(_rank\d+)?\.jsonl')


class _Parser(argparse.ArgumentParser):
    """Misuse is one line on stderr and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong without the usage block."""
        self.exit(2, f'nan_report: {message}\n')


def find_logs(work_dir: str) -> List[str]:
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


def _heads_text(heads: Dict[str, Dict[str, Any]], blamed: Any) -> Text:
    """One line a head that has losses or is blamed; ``>`` marks the latter.

    A part without losses of its own only passes on what a head did.
    """
    text = Text()
    for name, state in heads.items():
        head = HeadState(**{key: state[key] for key in _HEAD_KEYS
                            if key in state})
        if not head.losses and name != blamed:
            continue
        text.append('\n' if text else '')
        text.append('> ' if name == blamed else '  ')
        text.append(f'{name}: ')
        text.append(head.describe(), '' if head.fine else 'bold red')
    return text


def _number(value: Any) -> str:
    return f'{value:g}' if isinstance(value, (int, float)) else str(value)


def _row(incident: Dict[str, Any]) -> List[Text]:
    where = incident['where'] or {}
    scale = incident['loss_scale'] or {}
    counts = incident['counts'] or {}
    before, after = _number(scale.get('before')), _number(scale.get('after'))
    at = str(incident['iter'])
    if incident['epoch'] is not None:
        at += f'\nepoch {incident["epoch"]}'
    if incident['rank']:
        at += f'\nrank {incident["rank"]}'
    # Text, not str: rich reads markup in a str, and names are not ours.
    return [
        Text(at),
        Text(str(where.get('phase'))),
        _heads_text(incident['heads'] or {}, where.get('head')),
        Text(before if before == after else f'{before} -> {after}'),
        Text(f'{incident["action"]}\n{counts.get("consecutive")} in a row\n'
             f'{counts.get("total")} in all'),
    ]


def incident_table(incidents: Iterable[Dict[str, Any]], title: str) -> Table:
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
        self.rows: Dict[Tuple[str, str], List[int]] = {}

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


def main(argv: Optional[Sequence[str]] = None) -> int:
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
