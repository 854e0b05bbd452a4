"""Failed steps that are made again: real detectors, and what must not be."""
from __future__ import annotations

import copy
import hashlib
import math
import random
import re

import numpy as np
import pytest
import torch
from families import batch_for, build
from helpers.toy import ToyDetector, make_hot, toy_batch
from helpers.training import same, train, weights, wrap
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmdet_nanfix.guard import RetryResult
from mmdet_nanfix.guard import retry as retry_module

HIGH = 2.**30


def set_scale(wrapper, scale):
    wrapper.scale_rules.scale = scale
    wrapper.set_scale(scale)


def state_of(model, wrapper):
    state = dict(model.state_dict())
    for index, held in wrapper.optimizer.state_dict()['state'].items():
        state.update({f'{index} {key}': value for key, value in held.items()})
    state['torch'] = torch.get_rng_state()
    state['numpy'] = torch.tensor(np.random.get_state()[1].astype(np.int64))
    state['python'] = torch.tensor(random.getstate()[1])
    # Digests: the numbers themselves would fill the memory.
    return {key: hashlib.sha1(torch.as_tensor(value).detach().contiguous()
                              .view(-1).numpy().tobytes()).hexdigest()
            for key, value in state.items() if value is not None}


def training(name, scales, accumulate, steps=3):
    """Train, at a loss scale of its own where there is one for a step."""
    torch.manual_seed(0)
    MessageHub._instance_dict.clear()
    model = build(name)
    wrapper = build_optim_wrapper(model, dict(
        type='NanSafeAmpOptimWrapper', accumulative_counts=accumulate,
        loss_scale=dict(init_scale=64., max_scale=HIGH),
        clip_grad=dict(max_norm=35.), optimizer=dict(
            type='SGD', lr=1e-4, momentum=.9)))
    incidents = []
    wrapper.initialize_count_status(model, 0, steps * accumulate)
    wrapper.reporter.report = incidents.append
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(1)
    batch = batch_for(model, 96)
    states, logged = [], []
    for index in range(steps):
        if index in scales:
            set_scale(wrapper, scales[index])
        for _ in range(accumulate):
            out = model.train_step(copy.deepcopy(batch), wrapper)
        logged.append(float(out['loss']))
        states.append(state_of(model, wrapper))
    return states, logged, incidents


@pytest.mark.parametrize('name, accumulate', [
    ('faster_rcnn', 1), ('detr', 1), ('yolov3', 2)])
def test_a_retry_is_a_run_at_the_scale_that_it_chose(name, accumulate):
    """Weights, buffers, momentum and generators, bit for bit."""
    ours, logged, (incident, ) = training(name, {2: HIGH}, accumulate)
    assert incident.action == 'retried' and incident.cause.code == 'NF101'
    chosen = incident.remedy['scale']
    assert incident.loss_scale.after == chosen < HIGH
    assert incident.counts.total == 0
    wanted, other, none = training(name, {2: chosen}, accumulate)
    assert not none and logged == other
    for left, right in zip(ours, wanted):
        assert left.keys() == right.keys()
        assert [key for key in left if left[key] != right[key]] == []
    # And it has moved on.
    assert any(ours[1][key] != ours[2][key]
               for key in ours[1] if key.endswith('weight'))


class Fitted(BaseModel):
    """A line that is fitted."""

    def __init__(self):
        super().__init__()
        self.bbox_head = nn.Linear(2, 1)

    def forward(self, inputs, data_samples=None, mode='loss'):
        error = self.bbox_head(inputs['x']).float() - inputs['y']
        return {'loss': (error * error).mean()}


def fit(corrupt=1e4, steps=100):
    """Every tenth target is corrupt; its gradients overflow, then fit."""
    torch.manual_seed(0)
    model = Fitted()
    wrapper = build_optim_wrapper(model, dict(
        type='NanSafeAmpOptimWrapper', optimizer=dict(type='SGD', lr=.05)))
    actions = []
    for index in range(steps):
        x = torch.randn(16, 2)
        y = x @ torch.tensor([[2.], [-1.]]) + 1
        if index % 10 == 9:
            y = y + corrupt
        before = weights(model)
        model.train_step({'inputs': {'x': x, 'y': y}}, wrapper)
        if wrapper.skipped:
            assert same(before, weights(model))
        actions.append(wrapper.skipped)
    # A batch now and then says nothing of the scale.
    assert wrapper.scale_rules.scale == 256 or not any(actions)
    wanted = torch.tensor([[2., -1.]])
    return actions, float((model.bbox_head.weight - wanted).abs().max())


def test_a_corrupt_batch_that_would_fit_is_skipped(monkeypatch):
    """Finite at a low enough scale, and then far off the line."""
    actions, error = fit()
    assert [index for index, skipped in enumerate(actions) if skipped] == (
        list(range(9, 100, 10)))
    assert error < .1
    # What comes of it where whatever is finite is applied.
    monkeypatch.setattr('mmdet_nanfix.guard.history.History.sane',
                        lambda self, norm: True)
    actions, error = fit()
    assert not any(actions) and error > 10


def test_a_corrupt_batch_of_a_detector_is_skipped():
    """An image a hundred times too bright: finite at a low scale."""
    MessageHub._instance_dict.clear()
    torch.manual_seed(0)
    model = build('faster_rcnn', {'backbone.norm_eval': True})
    wrapper = wrap(model, loss_scale=dict(
        init_scale=2048., allow_high_start=True), optimizer=dict(
            type='SGD', lr=1e-5))
    wrapper.initialize_count_status(model, 0, 9)
    incidents = []
    wrapper.reporter.report = incidents.append
    batch = batch_for(model, 96)
    train(model, wrapper, batch, batch)
    bad = copy.deepcopy(batch)
    bad['inputs'][1] = bad['inputs'][1].float() * 100
    before = weights(model)
    train(model, wrapper, bad)
    (incident, ) = incidents
    assert incident.where.phase == 'backward'
    assert incident.action == 'skipped' and same(before, weights(model))
    # The gate: a lower scale would do, but for its gradient.
    largest = wrapper.guard.history.largest
    norm = float(re.search(r'norm is (\S+), unscaled', ' '.join(
        incident.origin['tests'])).group(1))
    assert norm > 10 * largest
    assert incident.cause.code == 'NF105'
    assert incident.images[0]['img_path'] == 'number 1'
    assert wrapper.scale_rules.scale == 2048.
    train(model, wrapper, batch)
    assert not wrapper.skipped and not same(before, weights(model))




def hot(nanfix=None, steps=1, **settings):
    """A toy with a hot head after one good step, and its incidents."""
    torch.manual_seed(0)
    MessageHub._instance_dict.clear()
    model = ToyDetector()
    wrapper = wrap(model, optimizer=dict(type='SGD', lr=1e-12),
                   nanfix=nanfix, **settings)
    wrapper.initialize_count_status(model, 0, 99)
    incidents = []
    wrapper.reporter.report = incidents.append
    wrapper.guard.history.accept(1e9)
    train(model, wrapper, toy_batch())
    make_hot(model.rpn_head)
    train(model, wrapper, *[toy_batch()] * steps)
    return model, wrapper, incidents


def test_a_head_is_saved_in_fp32_and_stays_so_after_three(said):
    model, wrapper, incidents = hot(steps=6)
    assert [incident.action for incident in incidents] == [
        'rescued_fp32_head'] * 3
    for incident in incidents:
        # The toy runs its layers in ``loss``.
        assert incident.cause.code == 'NF103'
        assert incident.remedy['fp32'] == ['rpn_head']
    assert wrapper.stop_rule.total == 0 and wrapper.stop_rule.saved == 3
    assert any('rpn_head runs in fp32 from now on' in line for line in said())
    # A checkpoint knows.
    state = copy.deepcopy(wrapper.state_dict())
    assert all(type(value) in (int, float)
               for value in state['loss_scaler'].values())
    torch.manual_seed(0)
    again = ToyDetector()
    make_hot(again.rpn_head)
    resumed = wrap(again, optimizer=dict(type='SGD', lr=1e-12))
    resumed.load_state_dict(state)
    train(again, resumed, *[toy_batch()] * 2)
    assert resumed.stop_rule.total == 0 and resumed.stop_rule.saved == 3
    assert resumed.stop_rule.steps == wrapper.stop_rule.steps + 2


def test_the_patch_is_the_setting_of_what_was_saved():
    _, wrapper, (incident, ) = hot()
    assert incident.cause.config_patch == (
        "optim_wrapper = dict(nanfix=dict(fp32_modules=['rpn_head']))")
    _, wrapper, incidents = hot(dict(fp32_modules=['rpn_head']), steps=3)
    assert not incidents and wrapper.stop_rule.saved == 0


def test_the_step_that_is_saved_moves_and_tells_its_losses():
    torch.manual_seed(0)
    model, wrapper, _ = hot()
    before = weights(model)
    (logged, ) = train(model, wrapper, toy_batch())
    # The step itself returns what it has seen; the hook has the others.
    assert not math.isfinite(logged['loss'])
    assert math.isfinite(float(wrapper.logged['loss']))
    assert not wrapper.skipped and not same(before, weights(model))


def test_a_part_that_does_not_exist_is_refused(toy):
    wrapper = wrap(toy, nanfix=dict(fp32_modules=['no_head']))
    with pytest.raises(ValueError, match="no 'no_head'; it has"):
        wrapper.initialize_count_status(toy, 0, 9)
    with pytest.raises(TypeError, match='list of str'):
        wrap(toy, nanfix=dict(fp32_modules='rpn_head'))


RETRY = 'mmdet_nanfix.hosts.mmengine.trainer.MMEngineTrainer.retry'


def out_of_memory(*args, **kwargs):
    raise MemoryError


def absurd(self, batches, *args):
    """The replay was fine, the step itself is not."""
    list(batches)
    return RetryResult({}, 1e30)


@pytest.mark.parametrize('how', ['no room', 'no memory', 'an absurd norm'])
def test_a_rescue_that_fails_leaves_a_skipped_step(how, monkeypatch):
    if how == 'no room':
        monkeypatch.setattr(retry_module, 'has_room', lambda *args: False)
    elif how == 'no memory':
        monkeypatch.setattr(RETRY,
                            out_of_memory)
    else:
        monkeypatch.setattr(RETRY, absurd)
    model, wrapper, incidents = hot(steps=0)
    before = copy.deepcopy(model.state_dict())
    train(model, wrapper, toy_batch())
    (incident, ) = incidents
    assert incident.action == 'skipped' and wrapper.skipped
    assert incident.remedy is None and wrapper.stop_rule.total == 1
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    monkeypatch.undo()
    train(model, wrapper, toy_batch())
    assert wrapper.stop_rule.saved == 1


def test_nothing_is_saved_before_a_step_was_accepted():
    torch.manual_seed(0)
    MessageHub._instance_dict.clear()
    model = ToyDetector()
    make_hot(model.rpn_head)
    wrapper = wrap(model)
    train(model, wrapper, toy_batch())
    assert wrapper.skipped and wrapper.stop_rule.saved == 0


def test_an_overflow_is_borne_as_often_as_hysteresis_says():
    """Each is retried; in a row they lower the scale all the same."""
    torch.manual_seed(0)
    MessageHub._instance_dict.clear()
    model = ToyDetector()
    wrapper = wrap(model, loss_scale=dict(
        init_scale=64., max_scale=HIGH, hysteresis=2))
    wrapper.initialize_count_status(model, 0, 99)
    train(model, wrapper, toy_batch())
    set_scale(wrapper, HIGH)
    scales = []
    for _ in range(3):
        train(model, wrapper, toy_batch())
        scales.append(wrapper.scale_rules.scale)
    assert scales[0] == HIGH and scales[1] == scales[2] < HIGH
    assert wrapper.stop_rule.saved == 2 and wrapper.stop_rule.total == 0


class Checkpointed(ToyDetector):
    """Large activations, small gradients, and the first computed again."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, inputs, data_samples=None, mode='loss'):
        x = self.backbone(inputs['x'])
        if self.reentrant is None:
            y = self.big(x)
        else:
            y = checkpoint(self.big, x, use_reentrant=self.reentrant)
        return {'loss': self.rpn_head.out(y).float().mean()}

    def big(self, x):
        return self.rpn_head.hidden(x * 2e3).relu() / 1e3


def fitting_scale(reentrant):
    torch.manual_seed(0)
    MessageHub._instance_dict.clear()
    model = Checkpointed(reentrant)
    wrapper = wrap(model, loss_scale=dict(init_scale=64., max_scale=HIGH))
    wrapper.initialize_count_status(model, 0, 99)
    train(model, wrapper, toy_batch())
    set_scale(wrapper, HIGH)
    train(model, wrapper, toy_batch())
    assert wrapper.stop_rule.saved == 1
    return wrapper.scale_rules.scale


def test_activations_that_are_computed_again_are_no_gradients():
    assert fitting_scale(None) == fitting_scale(True) == fitting_scale(False)


def test_the_last_window_is_as_long_as_it_is():
    """A replay divides the loss as the step did."""
    torch.manual_seed(0)
    MessageHub._instance_dict.clear()
    model = ToyDetector()
    wrapper = wrap(model, accumulative_counts=4, loss_scale=dict(
        init_scale=64., max_scale=HIGH))
    wrapper.initialize_count_status(model, 0, 5)
    incidents = []
    wrapper.reporter.report = incidents.append
    train(model, wrapper, *[toy_batch()] * 4)
    scale = 1024.
    while not incidents:
        # The least that is too high for one batch by itself.
        scale *= 2
        again, kept = copy.deepcopy(model), copy.deepcopy(
            wrapper.optimizer.state_dict())
        set_scale(wrapper, scale)
        wrapper._inner_count = 4
        train(model, wrapper, toy_batch())
        if not incidents:
            model.load_state_dict(again.state_dict())
            wrapper.optimizer.load_state_dict(kept)
    assert [incident.action for incident in incidents] == ['retried']
    assert wrapper.scale_rules.scale == scale / 2


def test_draws_after_a_rescue_that_failed_are_those_after_a_skip(monkeypatch):
    def draws(how):
        torch.manual_seed(0)
        MessageHub._instance_dict.clear()
        model = ToyDetector()
        wrapper = wrap(model, accumulative_counts=2, loss_scale=64.)
        wrapper.initialize_count_status(model, 0, 99)
        wrapper.guard.history.accept(1e9)
        train(model, wrapper, *[toy_batch()] * 2)
        make_hot(model.rpn_head)
        with monkeypatch.context() as patch:
            patch.setattr(
                RETRY, out_of_memory)
            if how == 'skip':
                patch.setattr('mmdet_nanfix.guard.retry.Retry.attempt',
                              lambda *args: None)
            torch.manual_seed(5)
            for _ in range(2):
                batch = toy_batch()
                # What data loading draws between two forwards.
                torch.manual_seed(7)
                torch.rand(3)
                model.train_step(batch, wrapper)
        assert wrapper.stop_rule.total == 1
        return torch.rand(4)

    assert torch.equal(draws('skip'), draws('fail'))
