from __future__ import annotations

import copy
import logging
import os

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from shapes import write_shapes
from torch import nn

import mmdet_nanfix  # noqa: F401  registers
from mmdet_nanfix import emulation
from mmdet_nanfix.emulation import autocast
from mmdet_nanfix.torch_support.features import (
    AUTOCAST_BY_DEVICE,
    HAS_HALF_ON_CPU,
)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


OLD = 'half precision on a CPU is emulated from torch 2.1 on'
needs_half = pytest.mark.skipif(not HAS_HALF_ON_CPU, reason=OLD)
REQUIRE = emulation.require
if not HAS_HALF_ON_CPU:
    def skip():
        """Skip whatever test asks for it."""
        pytest.skip(OLD)

    emulation.require = autocast.require = skip


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


@pytest.fixture
def real_require(monkeypatch):
    """For tests of the refusal itself."""
    for place in (emulation, autocast):
        monkeypatch.setattr(place, 'require', REQUIRE)


class Branch(nn.Module):
    """A head: one hidden layer, one output, a loss of its own."""

    def __init__(self, width=4):
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def loss(self, x, key, factor):
        return {key: self.out(self.hidden(x).relu()).float().mean() * factor}


class RoIHead(nn.Module):

    def __init__(self):
        super().__init__()
        self.bbox_head = Branch()


class ToyDetector(BaseModel):
    """Two heads over one backbone, as a two-stage detector has them."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.rpn_head = Branch()
        self.roi_head = RoIHead()

    def forward(self, inputs, data_samples=None, mode='loss'):
        x = self.backbone(inputs['x'])
        return {
            **self.rpn_head.loss(x, 'loss_first', inputs['rpn']),
            **self.roi_head.bbox_head.loss(x, 'loss_second', inputs['box']),
            'accuracy': torch.tensor(float('nan')),
        }


def toy_batch(rpn=1., box=1., x=1.):
    """Loss factors: nan spoils a loss, 1e30 overflows the gradients."""
    torch.manual_seed(1)
    return {'inputs': {'x': torch.randn(8, 4) * x, 'rpn': rpn, 'box': box}}


@pytest.fixture
def toy():
    torch.manual_seed(0)
    # A hub of an earlier run would lend its iteration to the log.
    MessageHub._instance_dict.clear()
    return ToyDetector()


@pytest.fixture
def said(caplog):
    """Messages of the plugin, through MMEngine's logger."""
    from mmengine.logging import MMLogger
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO)

    def messages():
        return [record.getMessage()[len('nanfix: '):]
                for record in caplog.records
                if record.getMessage().startswith('nanfix: ')]

    yield messages
    logger.removeHandler(caplog.handler)


def said_in(work_dir):
    """Messages of the plugin in the log file of the only run."""
    (log, ) = work_dir.glob('*/*.log')
    return [part.split('\n20')[0] for part in
            log.read_text().split('nanfix: ')[1:]]


@pytest.fixture(scope='session')
def shapes(tmp_path_factory):
    """The drawn images of the demo."""
    folder = tmp_path_factory.mktemp('shapes')
    write_shapes(str(folder))
    return str(folder) + '/'


@pytest.fixture(scope='session')
def _demo_config():
    return Config.fromfile(
        os.path.join(ROOT, 'configs/demo/shapes_fp16_512_nanfix.py'))


@pytest.fixture
def tiny_config(_demo_config, shapes, tmp_path):
    """The demo's config with two images of half the size a step."""
    cfg = copy.deepcopy(_demo_config)
    cfg.work_dir = str(tmp_path / 'work')
    for loader in (cfg.train_dataloader, cfg.val_dataloader,
                   cfg.test_dataloader):
        loader.batch_size = 2
        loader.dataset.data_root = shapes
    cfg.train_dataloader.dataset.indices = 8
    cfg.train_dataloader.dataset.pipeline.insert(
        2, dict(type='Resize', scale=(96, 80), keep_ratio=True))
    cfg.val_evaluator.ann_file = shapes + 'val.json'
    cfg.test_evaluator.ann_file = shapes + 'val.json'
    cfg.train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=1,
                         val_interval=10)
    cfg.default_hooks.logger.interval = 1
    # Visualizers of one name are one object, whatever its folder.
    cfg.visualizer.name = str(tmp_path)
    box = cfg.model.roi_head.bbox_head
    box.loss_cls.loss_weight = box.loss_bbox.loss_weight = 1.
    return cfg
