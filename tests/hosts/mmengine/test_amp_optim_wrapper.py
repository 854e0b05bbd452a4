from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from helpers.logs import said_in
from helpers.torch_features import needs_fused
from helpers.toy import ToyDetector, toy_batch
from helpers.training import SGD, same, train, weights, wrap
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measuring import Calls
from mmengine.optim import AmpOptimWrapper
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from stock import stock_on_cpu
from torch.utils.data import Dataset

import mmdet_nanfix
from mmdet_nanfix.emulation import autocast as emulation
from mmdet_nanfix.hosts.mmengine.amp_optim_wrapper import (
    NanSafeAmpOptimWrapper,
)
from mmdet_nanfix.incidents import IncidentLog, read_log
from mmdet_nanfix.torch_support.features import AUTOCAST_BY_DEVICE


def test_names_resolve_by_scope():
    from mmdet.registry import OPTIM_WRAPPERS as mmdet_wrappers
    from mmengine.registry import OPTIM_WRAPPERS as root_wrappers
    assert mmdet_wrappers.get('AmpOptimWrapper') is NanSafeAmpOptimWrapper
    assert root_wrappers.get('AmpOptimWrapper') is AmpOptimWrapper
    for registry in (mmdet_wrappers, root_wrappers):
        assert registry.get('NanSafeAmpOptimWrapper') is (
            NanSafeAmpOptimWrapper)


@pytest.mark.parametrize('optimizer, clip', [
    (dict(type='AdamW', lr=.01), dict(max_norm=1.)),
    pytest.param(dict(type='AdamW', lr=.01, fused=True), None,
                 marks=needs_fused)])
def test_a_thousand_bad_steps_and_a_good_one(toy, optimizer, clip):
    wrapper = wrap(toy, optimizer=optimizer, clip_grad=clip,
                   nanfix=dict(max_consecutive=None, max_incidents=10))
    before = weights(toy)
    bad = [toy_batch(rpn=math.nan), toy_batch(box=1e37)]
    for index in range(1000):
        train(toy, wrapper, bad[index % 2])
    assert same(before, weights(toy))
    assert wrapper.scale_rules.scale == 1
    train(toy, wrapper, toy_batch())
    after = weights(toy)
    assert not same(before, after)
    assert all(torch.isfinite(value).all() for value in after.values())


def test_healthy_steps_equal_stocks(toy):
    # Grows at 2 and 4, overflows where 2**9 is too much, like GradScaler.
    scale = dict(init_scale=128., growth_interval=2)
    runs = []
    # Without a replay ours knows no more of an overflow than stock.
    for kind, more in (('AmpOptimWrapper', {}), (
            'NanSafeAmpOptimWrapper', dict(nanfix=dict(max_incidents=0)))):
        model = copy.deepcopy(toy)
        with stock_on_cpu():
            wrapper = wrap(model, kind, loss_scale=dict(scale),
                           clip_grad=dict(max_norm=1.), **more,
                           optimizer=dict(type='AdamW', lr=.01))
            logs = train(model, wrapper, *[
                toy_batch(box=box) for box in (1., 2., 500., 1., 1., 3.)])
        runs.append((wrapper.loss_scaler.get_scale(), logs, weights(model)))
    (stock_scale, stock_logs, stock), (our_scale, our_logs, ours) = runs
    assert stock_scale == our_scale != 128
    assert same(stock, ours)
    assert [log['loss'].item() for log in stock_logs] == [
        log['loss'].item() for log in our_logs]


def test_a_healthy_step_reads_as_often_as_stock(toy):
    counts = []
    for kind in ('AmpOptimWrapper', 'NanSafeAmpOptimWrapper'):
        model = copy.deepcopy(toy)
        with stock_on_cpu():
            wrapper = wrap(model, kind, clip_grad=dict(max_norm=1.),
                           loss_scale=dict(init_scale=64.))
            train(model, wrapper, toy_batch())
            with Calls() as calls:
                train(model, wrapper, toy_batch())
        counts.append(calls)
    assert counts[0].reads == counts[1].reads > 0
    # A detector's step makes about 5,700; one percent of that is 57.
    assert counts[1].total - counts[0].total <= 35


def test_clipping_waits_for_the_check(toy):
    wrapper = wrap(toy, clip_grad=dict(max_norm=1.))
    train(toy, wrapper, toy_batch(box=1e37))
    assert 'train/grad_norm' not in wrapper.message_hub.log_scalars
    assert wrapper.reporter.summary.rows == {
        ('backward', 'roi_head.bbox_head'): [1, 1, 1]}


@pytest.mark.parametrize('kwargs, error, named', [
    (dict(loss_scale=dict(backoff_factor=-1.)), ValueError, 'backoff_factor'),
    (dict(loss_scale='static'), ValueError, 'static'),
    (dict(loss_scale=dict(scale=1.)), TypeError, 'scale'),
    (dict(dtype='float17'), ValueError, 'float17'),
    (dict(dtype=torch.int32), ValueError, 'int32'),
    (dict(dtype=16), TypeError, '16'),
    (dict(nanfix=dict(max_consecutive=0)), ValueError, 'max_consecutive'),
    (dict(nanfix=dict(max_consecutiv=1)), TypeError, 'max_consecutiv'),
    (dict(nanfix='on'), TypeError, 'nanfix'),
])
def test_impossible_arguments(toy, kwargs, error, named):
    with pytest.raises(error, match=named) as caught:
        wrap(toy, **kwargs)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('kwargs', [
    dict(), dict(loss_scale='dynamic'), dict(loss_scale=512.),
    dict(loss_scale=512), dict(loss_scale=dict(init_scale=65536.)),
    dict(loss_scale=dict(init_scale=2.**16, growth_factor=2.,
                         backoff_factor=.5, growth_interval=2000,
                         enabled=True)),
    dict(loss_scale=dict(enabled=False)),
    dict(dtype='float16'), dict(dtype='bfloat16'), dict(dtype='float32'),
    dict(dtype=torch.bfloat16), dict(dtype='float64'),
    dict(accumulative_counts=2, clip_grad=dict(type='value', clip_value=1.)),
])
def test_what_stock_accepts_is_accepted(toy, kwargs):
    before = weights(toy)
    train(toy, wrap(toy, **kwargs), toy_batch(), toy_batch())
    assert not same(before, weights(toy))


def test_stopping_saves_the_weights_first(toy, tmp_path, said):
    wrapper = wrap(toy, nanfix=dict(max_consecutive=3))
    wrapper.arm(toy)
    wrapper.reporter.log = IncidentLog(
        str(tmp_path / 'nanfix'), 0, print)
    train(toy, wrapper, toy_batch())
    before = weights(toy)
    bad = toy_batch(rpn=math.nan)
    train(toy, wrapper, bad, bad)
    with pytest.raises(mmdet_nanfix.NonFiniteError) as caught:
        train(toy, wrapper, bad)
    assert isinstance(caught.value, FloatingPointError)
    assert caught.value.incident.where.head == 'rpn_head'
    assert caught.value.incident.action == 'aborted'
    (saved, ) = (tmp_path / 'nanfix').glob('*.pth')
    assert str(saved) in str(caught.value)
    assert '3 optimizer steps in a row' in str(caught.value)
    stored = torch.load(saved, weights_only=True)['state_dict']
    assert same(before, stored)
    actions = [record['action'] for record in
               read_log(tmp_path / 'nanfix' / 'incidents.jsonl')]
    assert actions == ['skipped', 'skipped', 'aborted']
    lines = said()
    assert sum('in a row' in line for line in lines) == 3 + 1
    assert 'rpn_head' in lines[-1] and '┃' in lines[-1]


def test_checkpoints_load_both_ways(toy):
    ours = wrap(toy)
    train(toy, ours, toy_batch(box=1e37), toy_batch())
    state = ours.state_dict()
    assert all(type(value) in (int, float)
               for value in state['loss_scaler'].values())
    with stock_on_cpu():
        stock = wrap(toy, 'AmpOptimWrapper')
    stock.load_state_dict(copy.deepcopy(state))
    assert stock.loss_scaler.get_scale() == 128
    again = wrap(toy)
    again.load_state_dict(copy.deepcopy(state))
    assert again.state_dict()['loss_scaler'] == state['loss_scaler']
    train(toy, again, toy_batch())
    assert again.loss_scaler.get_scale() == 128
    with stock_on_cpu():
        train(toy, stock, toy_batch())
    again.load_state_dict(stock.state_dict())
    assert again.scale_rules.scale == 128
    plain = wrap(toy, 'OptimWrapper')
    again = wrap(toy)
    again.load_state_dict(plain.state_dict())
    assert again.scale_rules.scale == 256
    plain.load_state_dict(copy.deepcopy(state))


def test_a_collapsed_scale_in_a_checkpoint_is_repaired(toy, said):
    wrapper = wrap(toy)
    state = wrapper.state_dict()
    state['loss_scaler']['scale'] = 0.
    wrapper.load_state_dict(state)
    train(toy, wrapper, toy_batch())
    assert wrapper.loss_scaler.get_scale() == 256
    assert any('loss scale of 0' in line for line in said())


def test_a_checkpointed_model_trains(toy):
    """The recomputation runs in the backward, after the autocast region."""
    from torch.utils.checkpoint import checkpoint
    plain, checkpointed = toy, copy.deepcopy(toy)
    inner = checkpointed.roi_head.bbox_head
    hidden = inner.hidden

    class Checkpointed(torch.nn.Module):

        def __init__(self):
            super().__init__()
            self.inner = hidden

        def forward(self, x):
            return checkpoint(lambda y: self.inner(y).softmax(-1), x,
                              use_reentrant=False)

    class Softmax(torch.nn.Module):

        def __init__(self):
            super().__init__()
            self.inner = plain.roi_head.bbox_head.hidden

        def forward(self, x):
            return self.inner(x).softmax(-1)

    inner.hidden = Checkpointed()
    plain.roi_head.bbox_head.hidden = Softmax()
    for model in (plain, checkpointed):
        train(model, wrap(model), toy_batch(), toy_batch())
    assert same(weights(plain), weights(checkpointed))


def test_emulation_ends_with_the_step_and_with_an_error(toy):
    wrapper = wrap(toy)
    half = torch.rand(3).half()

    def inside():
        # Half where this torch takes it on a CPU.
        with torch.autocast('cpu', torch.float16 if AUTOCAST_BY_DEVICE
                            else torch.bfloat16):
            return half.exp().dtype

    train(toy, wrapper, toy_batch())
    assert inside() == torch.float16
    with pytest.raises(KeyError):
        toy.train_step({'inputs': {}}, wrapper)
    assert inside() == torch.float16


class Batches(Dataset):
    """Eight batches, two of them bad."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return toy_batch(rpn=math.nan if index in (2, 3) else 1.)


@pytest.mark.parametrize('by_epoch', [True, False])
def test_any_mmengine_model_without_mmdets_scope(toy, tmp_path, by_epoch):
    loop = dict(by_epoch=True, max_epochs=2) if by_epoch else dict(
        by_epoch=False, max_iters=16)
    runner = Runner(
        toy, str(tmp_path), experiment_name=f'toy{by_epoch}',
        train_dataloader=dict(
            dataset=Batches(), batch_size=1, num_workers=0,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=lambda items: items[0]),
        train_cfg=loop,
        optim_wrapper=dict(type='NanSafeAmpOptimWrapper', optimizer=SGD),
        visualizer=dict(type='Visualizer', vis_backends=[
            dict(type='LocalVisBackend'),
            dict(type='TensorboardVisBackend')]),
        default_scope='mmengine')
    assert DefaultScope.get_current_instance().scope_name == 'mmengine'
    runner.train()
    (path, ) = tmp_path.glob('*/nanfix/incidents.jsonl')
    records = list(read_log(path))
    assert [record['iter'] for record in records] == [3, 4, 11, 12]
    if by_epoch:
        assert [record['epoch'] for record in records] == [1, 1, 2, 2]
    assert {record['where']['head'] for record in records} == {'rpn_head'}
    assert records[-1]['counts'] == dict(consecutive=2, total=4, steps=12)
    lines = said_in(tmp_path)
    assert 'loss scale 256' in lines[0] and str(path) in lines[0]
    assert '4 of 16 optimizer steps were skipped' in lines[-1]
    assert len(lines) == 1 + 4 + 1
    scalars = (path.parent.parent / 'vis_data' / 'scalars.json').read_text()
    drawn = [json.loads(line) for line in scalars.splitlines()]
    assert [row['nanfix/skipped'] for row in drawn
            if 'nanfix/skipped' in row] == [1, 2, 3, 4]


def test_a_branch_that_is_not_used_keeps_its_weights(toy):
    """An anchor gradient of zero would let weight decay move it."""
    runs = []
    for kind in ('AmpOptimWrapper', 'NanSafeAmpOptimWrapper'):
        model = copy.deepcopy(toy)
        # What is left of the graph is the head alone.
        model.backbone.requires_grad_(False)
        with stock_on_cpu():
            wrapper = wrap(model, kind, loss_scale=dict(init_scale=64.),
                           optimizer=dict(type='AdamW', lr=.01))
            for keep in ('first', 'second', 'second', 'first'):
                with wrapper.optim_context(model):
                    losses = model(**toy_batch())
                    losses = {key: value for key, value in losses.items()
                              if keep in key}
                wrapper.update_params(model.parse_losses(losses)[0])
        runs.append(weights(model))
    assert same(*runs)


def test_layers_unfrozen_later_are_in_the_table(toy):
    toy.roi_head.requires_grad_(False)
    wrapper = wrap(toy, optimizer=SGD)
    train(toy, wrapper, toy_batch())
    toy.roi_head.requires_grad_(True)
    train(toy, wrapper, toy_batch(box=1e37))
    assert list(wrapper.reporter.summary.rows) == [
        ('backward', 'roi_head.bbox_head')]


def test_an_input_that_spoils_all_heads_is_named_and_no_head(toy):
    wrapper = wrap(toy)
    train(toy, wrapper, toy_batch(x=math.nan))
    assert list(wrapper.reporter.summary.rows) == [('input', '?')]


def test_a_visualizer_that_fails_never_stops_training(toy, said, monkeypatch):
    from mmengine.visualization import Visualizer

    class Broken:

        def add_scalar(self, *args, **kwargs):
            raise OSError(28, 'No space left on device')

    monkeypatch.setattr(Visualizer, '_instance_dict', {'x': None})
    monkeypatch.setattr(Visualizer, 'get_current_instance',
                        classmethod(lambda cls: Broken()))
    wrapper = wrap(toy)
    train(toy, wrapper, *[toy_batch(rpn=math.nan)] * 3)
    assert sum('visualizer takes no scalars' in line for line in said()) == 1
    assert wrapper.stop_rule.total == 3


@needs_fused
def test_half_weights_with_a_fused_optimizer(toy):
    toy.half()
    toy.backbone[1].float()
    wrapper = wrap(toy, optimizer=dict(type='AdamW', lr=.01, fused=True))
    before = weights(toy)
    train(toy, wrapper, toy_batch())
    assert not same(before, weights(toy))


def test_off_drops_the_settings(toy):
    from mmdet_nanfix.hosts.mmengine.amp_optim_wrapper import (
        StockAmpOptimWrapper,
    )
    optimizer = torch.optim.SGD(toy.parameters(), .1)
    with stock_on_cpu():
        wrapper = StockAmpOptimWrapper(optimizer=optimizer,
                                       nanfix=dict(init_scale=64.))
    assert wrapper.loss_scaler.get_scale() == 65536


def test_off_registers_names_and_replaces_nothing():
    code = ('import mmdet_nanfix\n'
            'from mmdet.registry import OPTIM_WRAPPERS as o\n'
            'print(o.get("AmpOptimWrapper").__name__,'
            ' o.get("NanSafeAmpOptimWrapper").__name__)\n')
    done = subprocess.run([sys.executable, '-c', code], text=True,
                          capture_output=True, check=True, timeout=120,
                          env=dict(os.environ, MMDET_NANFIX='off'))
    stock, ours = done.stdout.split()[-2:]
    assert (stock, ours) == ('StockAmpOptimWrapper',
                             'NanSafeAmpOptimWrapper')


@settings(deadline=None, max_examples=30,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sequence_of_micro_steps(data):
    """Counters, scale, weights and buffers after any history."""
    accumulate = data.draw(st.integers(1, 3))
    kinds = data.draw(st.lists(st.sampled_from(
        ['good', 'loss', 'input', 'gradient']), min_size=1, max_size=9))
    batches = dict(good=toy_batch(), loss=toy_batch(rpn=math.nan),
                   input=toy_batch(x=math.inf), gradient=toy_batch(box=1e37))
    torch.manual_seed(0)
    model = ToyDetector()
    wrapper = wrap(model, accumulative_counts=accumulate,
                   nanfix=dict(max_consecutive=None),
                   optimizer=dict(type='AdamW', lr=.01))
    wrapper.initialize_count_status(model, 0, len(kinds))
    steps = skipped = consecutive = 0
    scale = 256.
    kept = copy.deepcopy(model.state_dict())
    window = []
    for index, kind in enumerate(kinds):
        train(model, wrapper, batches[kind])
        window.append(kind)
        if len(window) < accumulate and index + 1 < len(kinds):
            continue
        steps += 1
        state = model.state_dict()
        unchanged = all(torch.equal(kept[name], state[name])
                        for name in kept)
        if set(window) == {'good'}:
            consecutive = 0
            assert not unchanged
        else:
            skipped, consecutive = skipped + 1, consecutive + 1
            assert unchanged
            if set(window) <= {'good', 'gradient'}:
                scale = max(scale / 2, 1.)
        kept, window = copy.deepcopy(state), []
        assert all(torch.isfinite(value).all() for value in state.values())
        rule = wrapper.stop_rule
        assert (rule.steps, rule.total, rule.consecutive) == (
            steps, skipped, consecutive)
        assert wrapper.scale_rules.scale == scale
        assert wrapper.loss_scaler.get_scale() == scale
        assert all(parameter.grad is None or not parameter.grad.any()
                   for parameter in model.parameters())
    assert wrapper.inner_count == len(kinds)


def test_parts_in_fp32_that_a_model_does_not_have(toy, said):
    """Of a checkpoint of another model; before arming and after."""
    wrapper = wrap(toy)
    state = wrapper.state_dict()
    state['loss_scaler'].update({'nanfix_fp32/old_head': 1,
                                 'nanfix_fp32/rpn_head': 1})
    wrapper.load_state_dict(copy.deepcopy(state))
    train(toy, wrapper, toy_batch())
    assert wrapper.promotions.names == ['rpn_head']
    wrapper.load_state_dict(copy.deepcopy(state))
    train(toy, wrapper, toy_batch())
    assert wrapper.promotions.names == ['rpn_head']
    assert sum('has old_head in fp32, which this model' in line
               for line in said()) == 2


def test_half_on_a_cpu_needs_what_it_is_emulated_with(toy, monkeypatch,
                                                      real_require):
    monkeypatch.setattr(emulation, 'HAS_HALF_ON_CPU', False)
    with pytest.raises(RuntimeError, match='needs torch 2.1'):
        wrap(toy)
    # Full precision does not.
    wrap(toy, dtype='float32')
    wrap(toy, 'NanSafeOptimWrapper')
