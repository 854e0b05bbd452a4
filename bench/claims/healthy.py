"""Count what is blamed in healthy detectors of many families.

``python bench/claims/healthy.py [--steps N] [NAMES]`` trains each for 30 steps
in emulated half without regions, on images of two sizes, counts incidents, and
then replays the last step under the probe all the same. ``seen`` are
operations that make something non-finite of finite inputs (attention masks,
areas of large RoIs), ``reached`` those that reached a loss or a gradient.
Exit status 1 where there is an incident or one has.
"""
from __future__ import annotations

import argparse
import os
import sys
import warnings
from typing import Any

import torch
from mmdet.testing import demo_mm_inputs
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))), 'lib'))

from families import FAMILIES, build, has_masks

from mmdet_nanfix.diagnosis.context import RunContext
from mmdet_nanfix.diagnosis.investigate import Investigator
from mmdet_nanfix.diagnosis.parts import ModelParts

__all__ = ['watch']


def _batch(model: torch.nn.Module, seed: int, size: int) -> dict[str, Any]:
    """Other pixels for each seed; one image is smaller and gets padded."""
    shapes = [(3, size, size), (3, size * 3 // 4, size // 2)]
    batch = demo_mm_inputs(
        2, shapes, num_items=[3, 4], num_classes=80,
        with_mask=has_masks(model))
    generator = torch.Generator().manual_seed(seed)
    batch['inputs'] = [torch.randint(0, 256, shape, generator=generator,
                                     dtype=torch.uint8) for shape in shapes]
    return batch


def watch(name: str, steps: int = 30, size: int = 320
          ) -> tuple[int, int, int]:
    """Train a family and look at its last step again.

    Args:
        name: Of :data:`families.FAMILIES`.
        steps: Training steps.
        size: Of the images.

    Returns:
        Incidents, origins seen in the replay, origins that reached a loss.
    """
    model = build(name)
    wrapper = build_optim_wrapper(model, dict(
        type='NanSafeAmpOptimWrapper', loss_scale=64., nanfix=dict(fp32=None),
        optimizer=dict(type='SGD', lr=1e-4)))
    for step in range(steps):
        model.train_step(_batch(model, step, size), wrapper)
    incidents = wrapper.stop_rule.total
    guard = wrapper.arm(model)
    result = Investigator(guard.parts, ModelParts(model)).investigate(
        guard.diagnosis.good, RunContext(scale=guard.scale.scale)).result
    if result is None:
        raise RuntimeError(f'no step of {name} was accepted')
    return incidents, result.seen, len(result.origins)


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--steps', type=int, default=30)
    parser.add_argument('names', nargs='*', metavar='NAME',
                        help=f'any of {", ".join(FAMILIES)}')
    arguments = parser.parse_args()
    MMLogger.get_current_instance().setLevel('ERROR')
    warnings.simplefilter('ignore')
    print('| family | incidents | seen | reached |\n|---|---|---|---|')
    blamed = 0
    for name in arguments.names or FAMILIES:
        if name not in FAMILIES:
            parser.error(f'{name!r} is not one of {", ".join(FAMILIES)}')
        incidents, seen, reached = watch(name, arguments.steps)
        blamed += incidents + reached
        print(f'| {name} | {incidents} | {seen} | {reached} |', flush=True)
    return 1 if blamed else 0


if __name__ == '__main__':
    sys.exit(main())
