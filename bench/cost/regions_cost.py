"""What the fp32 regions cost a training step, for detectors of many families.

``python bench/cost/regions_cost.py [--steps N] [NAMES]`` prints the table of
``regions.md``: tiny detectors on a CPU in emulated half, guarded, with
``fp32='heads'`` against ``fp32=None``, interleaved. Time is the median ratio
of neighbouring steps. Operations are those that reach the device. Memory is
the peak of a process of its own above what it starts with. What stock's
autocast refuses has no other side.
"""
from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))), 'lib'))

from families import FAMILIES, REFUSED, batch_for, build
from measuring import Calls, memory

__all__ = ['Side', 'row']


class Side:
    """A copy of a model, trained with one setting of the regions."""

    def __init__(self, model: nn.Module, fp32: str | None) -> None:
        self.model = copy.deepcopy(model)
        self.wrapper = build_optim_wrapper(self.model, dict(
            type='NanSafeAmpOptimWrapper', loss_scale=64.,
            optimizer=dict(type='SGD', lr=1e-5), nanfix=dict(fp32=fp32)))

    def step(self, batch: Any, seed: int) -> float:
        """Seconds of one training step."""
        batch = copy.deepcopy(batch)
        torch.manual_seed(seed)
        begin = time.perf_counter()
        self.model.train_step(batch, self.wrapper)
        return time.perf_counter() - begin

    def operations(self, batch: Any) -> int:
        """What one step calls."""
        with Calls() as calls:
            self.step(batch, 0)
        return calls.total


def peak(name: str, fp32: str | None) -> int:
    """Peak memory of three steps, in KiB, in a process of their own."""
    done = subprocess.run(
        [sys.executable, __file__, name, '--only', str(fp32)],
        capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def row(name: str, steps: int) -> str:
    """Markdown row of one family."""
    model = build(name)
    batch = batch_for(model)
    modes = ('heads', ) if name in REFUSED else ('heads', None)
    sides = {mode: Side(model, mode) for mode in modes}
    times: dict[Any, list[float]] = {mode: [] for mode in modes}
    for index in range(steps + 1):
        for mode in modes[::1 if index % 2 else -1]:
            seconds = sides[mode].step(batch, index)
            if index:
                times[mode].append(seconds)
    held = {mode: peak(name, mode) / 1024 for mode in modes}
    calls = {mode: sides[mode].operations(batch) for mode in modes}
    if name in REFUSED:
        return (f'| {name} | refused: {REFUSED[name][1]} | '
                f'{statistics.median(times["heads"]):.2f} s | '
                f'{calls["heads"]} | {held["heads"]:.0f} |')
    ratio = statistics.median(
        on / off for on, off in zip(times['heads'], times[None]))
    return (f'| {name} | {statistics.median(times[None]):.2f} s | {ratio:.3f} '
            f'times | {calls[None]} -> {calls["heads"]} | '
            f'{held[None]:.0f} -> {held["heads"]:.0f} |')


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    every = [*FAMILIES, *REFUSED]
    parser.add_argument('names', nargs='*', metavar='NAME',
                        help=f'any of {", ".join(every)}')
    parser.add_argument('--steps', type=int, default=12)
    parser.add_argument('--only', choices=('heads', 'None'),
                        help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    MMLogger.get_current_instance().setLevel('ERROR')
    for name in arguments.names:
        if name not in every:
            parser.error(f'{name!r} is not one of {", ".join(every)}')
    if arguments.only:
        (name, ) = arguments.names
        model = build(name)
        batch, side = batch_for(model), Side(
            model, None if arguments.only == 'None' else arguments.only)
        before = memory('VmRSS')
        for index in range(3):
            side.step(batch, index)
        print(memory('VmHWM') - before)
        return
    print('| family | step without | with | operations | peak memory, MiB |')
    print('|---|---|---|---|---|')
    for name in arguments.names or every:
        print(row(name, arguments.steps), flush=True)


if __name__ == '__main__':
    main()
