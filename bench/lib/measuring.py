"""Measure steps of a detector: operations, reads, memory."""
from __future__ import annotations

import collections
import os
from typing import Any

import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ['Calls', 'detector', 'memory']

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
READS = ('_local_scalar_dense', 'nonzero', 'equal', 'is_nonzero')


class Calls(TorchDispatchMode):
    """Counts the operations of a region, and the reads among them."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        self.by_name[func._schema.name[len('aten::'):]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """All operations."""
        return sum(self.by_name.values())

    @property
    def reads(self) -> int:
        """Those that wait for the device."""
        return sum(self.by_name[name] for name in READS)


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


def memory(field: str) -> int:
    """A field of this process's status, in KiB."""
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) for line in file
                    if line.startswith(field))
