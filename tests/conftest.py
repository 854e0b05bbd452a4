from __future__ import annotations

import copy
import gc
import logging
import os

import pytest
import torch
from helpers.paths import ROOT
from helpers.torch_features import OLD
from helpers.toy import ToyDetector
from mmengine.config import Config
from mmengine.logging import MessageHub
from shapes import write_shapes

import mmdet_nanfix  # noqa: F401  registers
from mmdet_nanfix import emulation
from mmdet_nanfix.emulation import autocast
from mmdet_nanfix.emulation.autocast import HAS_HALF_ON_CPU

REQUIRE = emulation.require
if not HAS_HALF_ON_CPU:
    def skip():
        """Skip whatever test asks for it."""
        pytest.skip(OLD)

    emulation.require = autocast.require = skip


@pytest.fixture(autouse=True)
def no_graph_of_another_test():
    """A graph that waits to be freed keeps CUDA's lists registered."""
    if autocast.is_emulating():
        gc.collect()


def slow_tests():
    """Node ids, or beginnings of such, that the quick suite leaves out."""
    with open(os.path.join(ROOT, 'tests', 'slow.txt')) as file:
        return [line.strip() for line in file
                if line.strip() and not line.startswith('#')]


def pytest_collection_modifyitems(items):
    slow = tuple(slow_tests())
    for item in items:
        if item.nodeid.startswith(slow):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def real_require(monkeypatch):
    """For tests of the refusal itself."""
    for place in (emulation, autocast):
        monkeypatch.setattr(place, 'require', REQUIRE)


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
