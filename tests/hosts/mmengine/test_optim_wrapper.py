from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from helpers.toy import ToyDetector, toy_batch
from helpers.training import same, train, weights, wrap

import mmdet_nanfix
from mmdet_nanfix.guard import RunConfig
from mmdet_nanfix.hosts.mmengine import reporter
from mmdet_nanfix.hosts.mmengine.settings import Settings


def test_accumulation_drops_the_window_of_a_bad_micro_step(toy):
    wrapper = wrap(toy, accumulative_counts=3)
    wrapper.initialize_count_status(toy, 0, 7)
    before = weights(toy)
    train(toy, wrapper, toy_batch(), toy_batch(rpn=math.nan), toy_batch())
    assert same(before, weights(toy))
    train(toy, wrapper, *[toy_batch()] * 3)
    middle = weights(toy)
    assert not same(before, middle)
    # The last window is short.
    train(toy, wrapper, toy_batch())
    assert not same(middle, weights(toy))
    assert wrapper.inner_count == 7
    assert (wrapper.stop_rule.steps, wrapper.stop_rule.total) == (3, 1)


def test_without_a_model_steps_are_skipped_and_stop_all_the_same(toy):
    wrapper = wrap(toy, nanfix=dict(max_consecutive=2))
    before = weights(toy)
    wrapper.update_params(toy.rpn_head.out.bias.sum() * math.nan)
    with pytest.raises(mmdet_nanfix.NonFiniteError, match='2 optimizer'):
        wrapper.update_params(toy.rpn_head.out.bias.sum() * math.nan)
    assert same(before, weights(toy))


def test_a_context_on_a_submodule_says_nothing_more(toy, said):
    wrapper = wrap(toy)
    wrapper.initialize_count_status(toy, 0, 10)
    for _ in range(3):
        with wrapper.optim_context(toy.backbone):
            pass
    assert sum('guarding' in line for line in said()) == 1


def test_a_backward_that_would_end_the_process_is_not_run(toy):
    """mmcv's deformable convolution on a CPU samples at NaN."""
    from mmcv.ops import DeformConv2dPack
    from mmengine.model import BaseModel

    class Deformed(BaseModel):

        def __init__(self):
            super().__init__()
            self.bbox_head = DeformConv2dPack(2, 2, 3, padding=1)

        def forward(self, inputs, data_samples=None, mode='loss'):
            return {'loss': self.bbox_head(inputs).mean()}

    torch.manual_seed(0)
    model = Deformed()
    wrapper = wrap(model, nanfix=dict(max_consecutive=None))
    good = {'inputs': torch.rand(1, 2, 5, 5)}
    bad = {'inputs': torch.full((1, 2, 5, 5), math.nan)}
    before = weights(model)
    train(model, wrapper, bad, bad)
    assert same(before, weights(model)) and wrapper.stop_rule.total == 2
    train(model, wrapper, good)
    assert not same(before, weights(model))
    assert wrapper._inner_count == 3


def test_modules_that_stock_takes():
    """Lazy layers and buffers that no norm can be taken of."""

    class Rich(ToyDetector):

        def __init__(self):
            super().__init__()
            self.late = torch.nn.LazyBatchNorm1d()
            self.register_buffer('small', torch.zeros(2).to(
                getattr(torch, 'float8_e5m2', torch.int8)))

        def forward(self, inputs, data_samples=None, mode='loss'):
            self.late(inputs['x'])
            return super().forward(inputs, data_samples, mode)

    torch.manual_seed(0)
    model = Rich()
    wrapper = wrap(model)
    train(model, wrapper, toy_batch(), toy_batch(rpn=math.nan), toy_batch())
    assert wrapper.stop_rule.state_dict()['nanfix_total'] == 1
    assert model.late.num_batches_tracked == 2


@pytest.mark.parametrize('lacking', [True, False])
def test_what_a_version_of_torch_lacks_is_said_once(toy, said, monkeypatch,
                                                    lacking):
    monkeypatch.setattr(reporter, 'HAS_EAGER_STANCE', not lacking)
    toy.rpn_head.hidden = torch.compile(toy.rpn_head.hidden, backend='eager')
    wrapper = wrap(toy, 'NanSafeOptimWrapper')
    train(toy, wrapper, toy_batch(), toy_batch())
    assert sum('cannot run compiled parts' in line
               for line in said()) == lacking


def test_wrappers_share_no_settings(toy):
    """Not even through their class."""
    one, two = (wrap(copy.deepcopy(toy)) for _ in range(2))
    one.config.by_hook = True
    one.settings.scale['init_scale'] = 1.
    assert two.config == RunConfig() and two.settings == Settings()
    shared = {name for kind in type(one).__mro__
              if kind.__module__.startswith('mmdet_nanfix')
              for name, value in vars(kind).items()
              if dataclasses.is_dataclass(value)
              or isinstance(value, (dict, list, set))} - {
                  '__annotations__', '__dict__'}
    assert shared == set()
