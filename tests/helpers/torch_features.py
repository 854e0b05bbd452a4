"""What this version of torch can do, for tests."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from mmdet_nanfix.emulation.autocast import HAS_HALF_ON_CPU
from mmdet_nanfix.torch_support.features import (
    AUTOCAST_BY_DEVICE,
)

OLD = 'half precision on a CPU is emulated from torch 2.1 on'


needs_half = pytest.mark.skipif(not HAS_HALF_ON_CPU, reason=OLD)


def takes_fused():
    try:
        torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    except RuntimeError:
        return False
    return True


needs_fused = pytest.mark.skipif(
    not takes_fused(),
    reason='torch has fused optimizers on a CPU from 2.4 on')


def autocast_is_on(device='cpu'):
    """Before torch 2.4 the question has no argument, and means CUDA."""
    if AUTOCAST_BY_DEVICE:
        return torch.is_autocast_enabled(device)
    return torch.is_autocast_enabled() if device == 'cuda' else (
        torch.is_autocast_cpu_enabled())


def cudas_autocast_dtype():
    if AUTOCAST_BY_DEVICE:
        return torch.get_autocast_dtype('cuda')
    return torch.get_autocast_gpu_dtype()
