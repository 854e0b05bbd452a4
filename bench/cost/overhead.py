"""What the guard costs a healthy step, beside the stock class and others.

``python bench/cost/overhead.py [--steps N]`` trains Faster R-CNN R18-FPN (2
images of 320x240, BatchNorm trained) with interleaved steps of each kind
(``guarded`` has no fp32 regions) and prints for each the median of its time
ratios to the stock step next to it, and what one step calls: aten operations
as they reach the device, operations counted by the profiler, and reads from
the device.

On a machine without a GPU stock is the stock class with its device check
bypassed, over the emulation of CUDA's autocast (``bench/lib/stock.py``).

The rivals watch every step: torch's anomaly mode, a finite check in a
forward hook of every module, and the debugging tool of ``transformers``,
where that is installed.
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import time
from typing import Any, Callable, ContextManager, Iterator

import torch
from mmdet.testing import demo_mm_inputs
from mmdet.utils import register_all_modules
from mmengine.optim import build_optim_wrapper
from torch import Tensor, nn

import mmdet_nanfix  # noqa: F401  registers

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))), 'lib'))

from measuring import Calls, detector
from stock import stock_on_cpu

__all__ = ['Side', 'count', 'sides']


class Side:
    """One way to train the same model on the same batch.

    Args:
        model: It gets a copy.
        kind: Type of the optimizer wrapper.
        around: Entered around each step.
        **settings: Of the wrapper.
    """

    def __init__(self, model: nn.Module, kind: str,
                 around: Callable[[nn.Module], ContextManager[Any]] = (
                     lambda model: contextlib.nullcontext()),
                 **settings: Any) -> None:
        self.model = copy.deepcopy(model)
        self.wrapper = build_optim_wrapper(self.model, dict(
            type=kind, optimizer=dict(type='SGD', lr=1e-4, momentum=.9),
            loss_scale=dict(init_scale=64.), **settings))
        if kind == 'AmpOptimWrapper':
            self.wrapper.loss_scaler.set_growth_interval(500)
        self._around = around

    def step(self, batch: Any) -> float:
        """Seconds of one training step."""
        batch = copy.deepcopy(batch)
        with self._around(self.model):
            begin = time.perf_counter()
            self.model.train_step(batch, self.wrapper)
            return time.perf_counter() - begin


@contextlib.contextmanager
def _forward_hooks(model: nn.Module) -> Iterator[None]:
    """A finite check of what every module returns."""

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and (
                not torch.isfinite(output).all()):
            raise FloatingPointError(type(module).__name__)

    handles = [module.register_forward_hook(look)
               for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _anomaly(model: nn.Module) -> ContextManager[Any]:
    return torch.autograd.detect_anomaly(check_nan=True)


def sides(rivals: bool = True) -> dict[str, Side]:
    """Stock, ours and the rivals that are installed."""
    model = detector()
    stock = 'AmpOptimWrapper'
    found = {'stock': Side(model, stock)}
    for name, fp32 in (('guarded', None), ('fp32 in heads', 'heads')):
        found[name] = Side(model, 'NanSafeAmpOptimWrapper',
                           nanfix=dict(fp32=fp32))
    if not rivals:
        return found
    found['anomaly mode'] = Side(model, stock, _anomaly)
    found['forward hooks'] = Side(model, stock, _forward_hooks)
    try:
        from transformers.debug_utils import DebugUnderflowOverflow
    except ImportError:
        return found
    rival = Side(model, stock)
    DebugUnderflowOverflow(rival.model)
    return {**found, 'DebugUnderflowOverflow': rival}


def count(side: Side, batch: Any) -> dict[str, int]:
    """Operations and reads of one step, sampling alike on all sides."""
    torch.manual_seed(0)
    with Calls() as calls:
        side.step(batch)
    torch.manual_seed(0)
    with torch.profiler.profile() as profile:
        side.step(batch)
    profiled = sum(event.count for event in profile.key_averages()
                   if event.key.startswith('aten::'))
    return {'aten': calls.total, 'profiled': profiled, 'reads': calls.reads}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--no-rivals', action='store_true',
                        help='stock and ours only')
    arguments = parser.parse_args()
    steps = arguments.steps
    register_all_modules()
    batch = demo_mm_inputs(2, (3, 240, 320), num_items=[5, 5], num_classes=3)
    with stock_on_cpu():
        every = sides(rivals=not arguments.no_rivals)
        times: dict[str, list[float]] = {name: [] for name in every}
        for index in range(steps + 2):
            # Each in turn goes first: what runs after another is slower.
            names = list(every)
            names = names[index % len(names):] + names[:index % len(names)]
            for name in names:
                torch.manual_seed(index)
                seconds = every[name].step(batch)
                if index >= 2:
                    times[name].append(seconds)
        counts = {name: count(side, batch) for name, side in every.items()}
    print(f'{steps} interleaved steps; stock: median '
          f'{statistics.median(times["stock"]):.3f} s')
    print(f'{"":24}{"time":>8}{"aten":>8}{"profiled":>10}{"reads":>7}')
    for name in every:
        ratio = statistics.median(
            own / stock for own, stock in zip(times[name], times['stock']))
        said = counts[name]
        print(f'{name:24}{ratio:8.3f}{said["aten"]:8}{said["profiled"]:10}'
              f'{said["reads"]:7}')


if __name__ == '__main__':
    main()
