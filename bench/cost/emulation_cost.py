"""What the emulation costs: one training step in fp32 and in emulated half.

``python bench/cost/emulation_cost.py [--steps N]`` prints the medians of
interleaved steps of Faster R-CNN R18-FPN (2 images of 320x240), their ratio,
and the peak memory of each kind, measured in a process of its own.
"""
from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from mmdet.testing import demo_mm_inputs
from mmdet.utils import register_all_modules

from mmdet_nanfix.emulation import cuda_autocast

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))), 'lib'))

from measuring import detector, memory

KINDS = ('fp32', 'half')


def step(model: Any, batch: Any, kind: str) -> float:
    """Seconds of one forward and backward."""
    model.zero_grad()
    begin = time.perf_counter()
    with cuda_autocast() if kind == 'half' else contextlib.nullcontext():
        data = model.data_preprocessor(batch, True)
        losses = model(**data, mode='loss')
    loss, _ = model.parse_losses(losses)
    (loss * 64).backward()
    return time.perf_counter() - begin


def peak_memory(kind: str, steps: int) -> int:
    """Peak of a process of its own, in KiB, less what it starts with."""
    done = subprocess.run(
        [sys.executable, os.path.abspath(__file__), '--only', kind,
         '--steps', str(steps)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--steps', type=int, default=15)
    parser.add_argument('--only', choices=KINDS)
    arguments = parser.parse_args()
    register_all_modules()
    model = detector()
    batch = demo_mm_inputs(2, (3, 240, 320))
    if arguments.only:
        # The first step of a process allocates what later ones reuse.
        before = memory('VmRSS')
        for _ in range(arguments.steps):
            step(model, batch, arguments.only)
        print(memory('VmHWM') - before)
        return
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for index in range(arguments.steps + 2):
        for kind in KINDS:
            seconds = step(model, batch, kind)
            if index >= 2:
                times[kind].append(seconds)
    for kind in KINDS:
        print(f'{kind}: median {statistics.median(times[kind]):.3f} s of '
              f'{arguments.steps} interleaved steps, peak memory '
              f'{peak_memory(kind, 3) / 1024:.0f} MiB above the start')
    ratios = [half / fp32 for fp32, half in zip(*times.values())]
    print(f'half / fp32: median ratio {statistics.median(ratios):.3f} of the '
          'pairs')


if __name__ == '__main__':
    main()
