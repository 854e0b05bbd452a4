"""What the begin of a guarded step costs, by the number of modules.

``python bench/cost/begin_cost.py [--modules N ...]`` builds models of so many
modules, each with ten attributes and, in one column, a third of them with
buffers, and prints medians in ms: a whole look at the model, the begin of a
step where nothing new hangs below it, and the end of a forward within an
accumulation window. No forward runs; the copy of the buffers is left out of
the first column.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, Callable

import torch
from torch import nn

from mmdet_nanfix.guard.state import Snapshot
from mmdet_nanfix.guard.state.transaction import Transaction
from mmdet_nanfix.guard.state.tree import StateTree

__all__ = ['Block', 'costs', 'model_of']


class Block(nn.Module):
    """Ten attributes, two of them containers; with layers, if asked for."""

    def __init__(self, index: int, layers: bool) -> None:
        super().__init__()
        self.stride, self.name, self.shape, self.skip = 1, 'x', (1, 2), None
        self.levels, self.table = [1, 2, 3], {'index': index}
        self.ratio, self.on, self.index, self.pair = .5, True, index, (0, 1)
        if layers:
            self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)


def model_of(modules: int, layers: bool = False) -> nn.Module:
    """A model of about so many modules.

    Args:
        modules: Their number.
        layers: Whether two of three are torch's own layers.
    """
    count = modules // 3 if layers else modules - 1
    return nn.Sequential(*[Block(index, layers) for index in range(count)])


def _median(action: Callable[[], Any], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken)


def costs(model: nn.Module, repeats: int = 15) -> tuple[float, float, float]:
    """Medians in ms: of a whole look, of a begin, of an end.

    Args:
        model: The model.
        repeats: Of each.
    """
    transaction = Transaction(model, (), StateTree(model).snapshot)
    for _ in range(3):
        transaction.begin()
        transaction.commit()
    whole = _median(lambda: Snapshot.of([model]), repeats)
    begin = _median(transaction.begin, repeats)
    ends = []
    for _ in range(repeats):
        transaction.begin()
        ends.append(_median(transaction.settle, 1))
        transaction.commit()
    return whole, begin, statistics.median(ends)


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--modules', type=int, nargs='*',
                        default=[200, 1000, 2000])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print('| modules | of torch | whole look | begin | end |\n'
          '|---|---|---|---|---|')
    for layers in (False, True):
        for modules in arguments.modules:
            found = costs(model_of(modules, layers))
            print(f'| {modules} | {"2 of 3" if layers else "none"} | '
                  + ' | '.join(f'{value:.2f}' for value in found) + ' |')
    return 0


if __name__ == '__main__':
    sys.exit(main())
