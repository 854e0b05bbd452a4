"""What the emulation costs: one training step in fp32 and in emulated half.

``python bench/emulation_cost.py [--steps N]`` prints the medians of
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

import torch
from mmdet.registry import MODELS
from mmdet.testing import demo_mm_inputs
from mmdet.utils import register_all_modules
from mmengine.config import Config

from mmdet_nanfix.emulation import cuda_autocast

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KINDS = ('fp32', 'half')


def detector() -> Any:
    """Faster R-CNN R18-FPN with MMDetection's own sampling."""
    cfg = Config.fromfile(os.path.join(ROOT, 'configs', '_base_small.py'))
    cfg.model.train_cfg.rcnn.sampler.num = 512
    cfg.model.train_cfg.rpn.sampler.num = 256
    cfg.model.train_cfg.rpn_proposal.update(nms_pre=2000, max_per_img=1000)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()
    return model.train()


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


def memory(field: str) -> int:
    """A field of this process's status, in KiB."""
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) for line in file
                    if line.startswith(field))


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
