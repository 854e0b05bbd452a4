"""Train detectors of many families in emulated half precision.

``python bench/claims/families_train.py`` trains each for three steps and
prints the dtypes at the input of each head and of each loss, as in
``families.md`` beside it.
"""
from __future__ import annotations

import argparse
import os
import sys
from typing import Iterator

from mmengine.logging import MMLogger

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))), 'lib'))

from families import FAMILIES, Seen, build, train

__all__ = ['table']


def table(name: str, seen: Seen) -> Iterator[str]:
    """Markdown rows of one family."""
    for module, (first, others) in seen.items():
        if first or others:
            yield (f'| {name} | {FAMILIES[name][0]} | `{module}` | '
                   f'{", ".join(sorted(first))} | '
                   f'{", ".join(sorted(others))} |')


def main() -> None:
    """Train them all and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
    parser.add_argument('names', nargs='*', metavar='NAME',
                        help=f'any of {", ".join(FAMILIES)}')
    names = parser.parse_args().names or list(FAMILIES)
    # Weight initialisation is told line by line.
    MMLogger.get_current_instance().setLevel('ERROR')
    for name in names:
        if name not in FAMILIES:
            parser.error(f'{name!r} is not one of {", ".join(FAMILIES)}')
    print('| family | kind | module | first input | other inputs |')
    print('|---|---|---|---|---|')
    for name in names:
        print('\n'.join(table(name, train(build(name))[1])), flush=True)


if __name__ == '__main__':
    main()
