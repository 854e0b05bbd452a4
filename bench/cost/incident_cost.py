"""What an incident costs: found, located, explained.

``python bench/cost/incident_cost.py [--steps N]`` trains Faster R-CNN R18-FPN
(2 images of 320x240, emulated half) and prints for faults of several kinds the
time of the step that fails, in healthy steps, with the number of its
replays; then the time of a run in which 1 % of the batches are bad against
one without, interleaved step by step.
"""
from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict

import torch
from mmdet.testing import demo_mm_inputs
from mmdet.utils import register_all_modules
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from torch import nn

from mmdet_nanfix.diagnosis.replay.replayer import Replayer

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))), 'lib'))

from measuring import detector

__all__ = ['FAULTS', 'Run']

Batch = Dict[str, Any]


def _weight(name: str, factor: float) -> Spoil:

    def spoil(run: Run, batch: Batch) -> None:
        with torch.no_grad():
            run.model.get_parameter(name).mul_(factor)

    return spoil


def _pixel(run: Run, batch: Batch) -> None:
    batch['inputs'] = [image.float() for image in batch['inputs']]
    batch['inputs'][1][0, 40, 40] = float('nan')


def _pixels(run: Run, batch: Batch) -> None:
    batch['inputs'] = [image.float() for image in batch['inputs']]
    batch['inputs'][1] *= 1e6


def _box(run: Run, batch: Batch) -> None:
    boxes = batch['data_samples'][1].gt_instances.bboxes
    getattr(boxes, 'tensor', boxes)[0, 2] = float('nan')


def _gradients(run: Run, batch: Batch) -> None:
    run.model.get_submodule('rpn_head.loss_cls').loss_weight = 1e7


def _scale(run: Run, batch: Batch) -> None:
    run.wrapper.scale_rules.scale = 2.**30
    run.wrapper.set_scale(2.**30)


def _hot(run: Run, batch: Batch) -> None:
    """A hidden layer leaves half's range, and nothing else does."""
    head = run.model.get_submodule('roi_head.bbox_head')
    with torch.no_grad():
        head.shared_fcs[0].bias.add_(1.)
        for value in head.shared_fcs[0].parameters():
            value.mul_(2.**17)
        head.shared_fcs[1].weight.div_(2.**17)


Spoil = Callable[['Run', Batch], None]
FAULTS: dict[str, Spoil] = {
    'a NaN pixel': _pixel,
    'pixels a million times too large': _pixels,
    'a NaN box': _box,
    'a NaN weight': _weight('rpn_head.rpn_cls.bias', float('nan')),
    'box head overflows in the forward': _weight(
        'roi_head.bbox_head.shared_fcs.0.weight', 1e6),
    'backbone overflows in the forward': _weight('backbone.conv1.weight',
                                                 1e5),
    'gradients of the RPN overflow': _gradients,
    'the loss scale is too high (made again)': _scale,
    'the box head leaves half (made again)': _hot,
}


class Run:
    """A copy of a model in guarded training."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.wrapper = build_optim_wrapper(self.model, dict(
            type='NanSafeAmpOptimWrapper', loss_scale=64.,
            optimizer=dict(type='SGD', lr=1e-4, momentum=.9)))

    def step(self, batch: Batch, seed: int) -> float:
        """Seconds of one training step."""
        torch.manual_seed(seed)
        begin = time.perf_counter()
        self.model.train_step(batch, self.wrapper)
        return time.perf_counter() - begin


def _incident(model: nn.Module, batch: Batch, spoil: Spoil
              ) -> tuple[float, float, int]:
    """Seconds of a healthy step and of one that fails; replays of it."""
    run = Run(model)
    healthy = statistics.median(
        [run.step(copy.deepcopy(batch), seed) for seed in range(5)][1:])
    bad = copy.deepcopy(batch)
    spoil(run, bad)
    made: list[Any] = []
    original = Replayer.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return original(*args, **kwargs)

    Replayer.run = counted  # type: ignore[method-assign]
    try:
        seconds = run.step(bad, 9)
    finally:
        Replayer.run = original  # type: ignore[method-assign]
    if not run.wrapper.stop_rule.total + run.wrapper.stop_rule.saved:
        raise RuntimeError('the fault was none')
    return healthy, seconds, len(made)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=100)
    steps = parser.parse_args().steps
    MMLogger.get_current_instance().setLevel('ERROR')
    register_all_modules()
    batch = demo_mm_inputs(2, (3, 240, 320), num_items=[5, 5], num_classes=3)
    model = detector()
    print('| fault | failing step, in healthy steps | replays |')
    print('|---|---|---|')
    for name, spoil in FAULTS.items():
        healthy, seconds, count = _incident(model, batch, spoil)
        print(f'| {name} | {seconds / healthy:.1f} | {count} |', flush=True)
    fine, spoilt = Run(model), Run(model)
    totals = [0., 0.]
    for step in range(steps):
        bad = copy.deepcopy(batch)
        if step % 100 == 50:
            _pixels(spoilt, bad)
        for index in (0, 1) if step % 2 else (1, 0):
            totals[index] += (fine, spoilt)[index].step(
                copy.deepcopy(batch) if index == 0 else bad, step)
    print(f'{steps} steps, {spoilt.wrapper.stop_rule.total} of them bad: '
          f'{totals[1] / totals[0]:.3f} times a healthy run')


if __name__ == '__main__':
    main()
