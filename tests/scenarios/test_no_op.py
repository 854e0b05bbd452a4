"""A skipped step is a no-op: real detectors, real Runner.

The reference is the same run in which the training step of iteration k does
nothing and no average is updated.
"""
from __future__ import annotations

import copy
import math

import pytest
import torch
from families import build
from helpers.runs import Book, NoStep, differing, make
from mmdet.registry import MODELS
from mmdet.testing import demo_mm_inputs
from torch.utils.data import Dataset

from mmdet_nanfix.incidents import read_log

BAD_AT = 1
LENGTH = 3


class Inputs(Dataset):
    """Batches as the collate function hands them over, one of them bad."""

    def __init__(self, fault=None):
        self.fault = fault

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        batch = demo_mm_inputs(2, (3, 64, 64), num_items=[2, 3],
                               num_classes=80)
        batch['inputs'] = [image.float() for image in batch['inputs']]
        if index == BAD_AT and self.fault == 'nan pixel':
            batch['inputs'][1][0, 5, 5] = math.nan
        if index == BAD_AT and self.fault == 'nan target':
            boxes = batch['data_samples'][0].gt_instances.bboxes
            boxes = getattr(boxes, 'tensor', boxes)
            boxes[0, 2] = math.nan
        return batch


class Spoiled:
    """A forward hook of the user's: spoils the losses of one iteration."""

    def __init__(self, fault):
        self.fault, self.calls = fault, 0

    def __call__(self, model, inputs, losses):
        at, self.calls = self.calls, self.calls + 1
        if at != BAD_AT or self.fault is None:
            return None
        key = next(name for name, value in losses.items() if 'loss' in name
                   and not isinstance(value, list))
        factor, term = dict(
            loss=(1., math.inf), gradient=(1e33, 0.)).get(
                self.fault, (1., 0.))
        return {**losses, key: losses[key] * factor + term}


EMA = dict(type='EMAHook', ema_type='ExponentialMovingAverage',
           momentum=.1, update_buffers=True, priority=49)


def yolox():
    model = build('yolox')
    model.data_preprocessor.batch_augments = torch.nn.ModuleList([
        MODELS.build(dict(type='BatchSyncRandomResize', interval=1,
                          random_size_range=(64, 128), size_divisor=32))])
    return model


MODELS_OF = {
    'faster_rcnn': lambda: build('faster_rcnn'),
    'yolox': yolox,
    'detr': lambda: build('detr'),
    'dynamic_rcnn': lambda: build('dynamic_rcnn'),
}
_BUILT = {}


def host_state(model):
    """What a scan of mmdet found to advance in a forward."""
    state = {}
    for name, module in model.named_modules():
        for key in ('iou_history', 'beta_history', '_input_size', 'beta'):
            if key in module.__dict__:
                state[f'{name}.{key}'] = copy.deepcopy(module.__dict__[key])
    return state


class Pages(Book):
    """The book in short, with the state of the host beside it."""

    @staticmethod
    def keep(page):
        return {key: torch.tensor(hash(value.numpy().tobytes()))
                if isinstance(value, torch.Tensor) else value
                for key, value in page.items()}

    def after_train_iter(self, runner, *args, **kwargs):
        super().after_train_iter(runner, *args, **kwargs)
        self.pages[-1]['host'] = host_state(runner.model)


def run(folder, name, fault=None, prepare=None):
    folder.mkdir()
    if name not in _BUILT:
        _BUILT[name] = MODELS_OF[name]()
    model, book = copy.deepcopy(_BUILT[name]), Pages()
    model.register_forward_hook(Spoiled(fault))
    runner = make(model, folder, Inputs(fault), batches=LENGTH,
                  hooks=[book, dict(EMA)], checkpoints=9,
                  optimizer=dict(type='AdamW', lr=1e-4))
    if prepare is not None:
        prepare(runner)
    runner.train()
    return book.pages


@pytest.fixture(scope='module')
def references():
    """One reference a detector and policy, made when first asked for."""
    return {}


@pytest.mark.parametrize('name', sorted(MODELS_OF))
@pytest.mark.parametrize('fault', ['loss', 'gradient', 'nan pixel',
                                   'nan target'])
def test_nothing_is_left_of_a_skipped_step(name, fault, tmp_path,
                                           references):
    overflow = fault == 'gradient'
    if (name, overflow) not in references:
        references[name, overflow] = run(
            tmp_path / 'reference', name,
            prepare=NoStep(BAD_AT, backoff=overflow))
    wanted = references[name, overflow]
    pages = run(tmp_path / 'ours', name, fault)
    (log, ) = tmp_path.glob('ours/*/nanfix/incidents.jsonl')
    (record, ) = read_log(log)
    assert record['iter'] == BAD_AT + 1
    assert (record['where']['phase'] == 'backward') is overflow
    for index, (left, right) in enumerate(zip(pages, wanted)):
        assert left.pop('host') == (host := right['host'])
        right = {key: value for key, value in right.items()
                 if key != 'host'}
        assert differing(left, right) == [], index
    if name == 'dynamic_rcnn':
        assert any('iou_history' in key for key in host)
    if name == 'yolox':
        assert any('_input_size' in key for key in host)
    if name == 'detr' and fault.startswith('nan'):
        assert 'ValueError' in record['error']
