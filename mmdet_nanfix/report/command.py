"""Print the incidents of a work directory: the command line."""
from __future__ import annotations

import argparse
import io
import json
import os
import sys
from typing import NoReturn, Sequence

from rich.console import Console
from rich.text import Text

from ..incidents import read_log
from .table import find_logs, incident_table, paragraphs

__all__ = ['main']


class _Parser(argparse.ArgumentParser):
    """Misuse is one line on stderr and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong without the usage block."""
        self.exit(2, f'nan_report: {message}\n')


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
    parser = _Parser(prog='nan_report', description=__doc__)
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
