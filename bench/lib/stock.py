"""The stock ``AmpOptimWrapper`` on a CPU, as the baseline of comparisons.

The stock class refuses to be built without a GPU, and MMEngine's autocast
takes only bfloat16 on a CPU. What is bypassed is exactly that: the device
check, the scaler's device and the autocast context, which becomes our
emulation of CUDA's. All decisions are the stock class's own.

``python bench/lib/stock.py TRAIN_PY CONFIG ...`` runs a training script so.
"""
from __future__ import annotations

import contextlib
import functools
import runpy
import sys
from typing import Any, Iterator
from unittest import mock

import mmengine.optim.optimizer.amp_optimizer_wrapper as stock_module
import mmengine.runner.amp as amp_module
import torch
from mmdet.registry import OPTIM_WRAPPERS
from torch.optim.optimizer import register_optimizer_step_post_hook

from mmdet_nanfix import emulation
from mmdet_nanfix.torch_support.features import HAS_CPU_SCALER
from mmdet_nanfix.torch_support.grad_scaler import CpuGradScaler

__all__ = ['stock_on_cpu']


@contextlib.contextmanager
def _autocast(device_type: str | None = None,
              dtype: torch.dtype | None = None,
              enabled: bool = True,
              cache_enabled: bool | None = None) -> Iterator[None]:
    with emulation.cuda_autocast(dtype or torch.float16) if enabled else (
            contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def stock_on_cpu() -> Iterator[None]:
    """Region in which the stock class can be built and used on a CPU.

    In it mmdet's scope resolves ``AmpOptimWrapper`` to the stock class too.
    """
    scaler: Any = functools.partial(torch.amp.GradScaler, 'cpu') if (
        HAS_CPU_SCALER) else CpuGradScaler
    unshadowed = {
        name: kind for name, kind in OPTIM_WRAPPERS.module_dict.items()
        if name != 'AmpOptimWrapper'}
    with mock.patch.dict(OPTIM_WRAPPERS.module_dict, unshadowed,
                         clear=True), \
            mock.patch.object(stock_module, 'is_cuda_available',
                           lambda: True), \
            mock.patch.object(stock_module, 'GradScaler', scaler), \
            mock.patch.object(amp_module, 'autocast', _autocast):
        yield


def main(argv: Any) -> None:
    """Run a training script with the stock class on a CPU."""
    script, *arguments = argv
    sys.argv = [script, *arguments]
    taken: list[Any] = []
    register_optimizer_step_post_hook(lambda *step: taken.append(None))
    with stock_on_cpu():
        runpy.run_path(script, run_name='__main__')
    print(f'stock: optimizer stepped {len(taken)} times')


if __name__ == '__main__':
    main(sys.argv[1:])
