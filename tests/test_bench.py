"""The comparisons in ``bench/``, as far as a CPU can run them."""
from __future__ import annotations

import math
import os
import subprocess
import sys

import begin_cost
import families
import families_train
import gpu_agreement
import losses
import measuring
import overhead
import pytest
import regions_cost
import torch
from helpers.paths import ROOT
from helpers.torch_features import autocast_is_on, needs_half

from mmdet_nanfix.guard.state.transaction import Transaction
from mmdet_nanfix.guard.state.tree import StateTree


@pytest.fixture(scope='module')
def listed():
    """Rows of the table that is in the repository."""
    with open(os.path.join(ROOT, 'bench', 'claims', 'families.md')) as file:
        return {line.strip() for line in file if line.startswith('| ')}


@pytest.mark.parametrize('name', families.FAMILIES)
def test_families_train_in_emulated_half(name, listed):
    losses, seen = families.train(families.build(name))
    assert len(losses) == 3
    assert all(math.isfinite(value) for step in losses
               for key, value in step.items() if 'loss' in key)
    # The weights moved: the loss of the same batch did too.
    assert losses[0]['loss'] != losses[2]['loss']
    rows = set(families_train.table(name, seen))
    assert rows and rows <= listed


@pytest.mark.parametrize('readme', ['README.md', 'README_zh-CN.md'])
def test_the_tables_of_losses_are_those_of_the_readme(readme):
    with open(os.path.join(ROOT, readme)) as file:
        said = [line.strip() for line in file]
    rows = [*losses.loss_rows(), *losses.cost_rows()]
    assert len(rows) == 37
    assert [row for row in rows if row not in said] == []


def test_the_cost_of_regions_is_measured():
    with open(os.path.join(ROOT, 'bench', 'cost', 'regions.md')) as file:
        said = {line.split('|')[1].strip() for line in file
                if line.startswith('| ')}
    assert {*families.FAMILIES, *families.REFUSED} <= said
    model = families.build('centernet')
    side = regions_cost.Side(model, 'heads')
    assert side.operations(families.batch_for(model)) > 500


@pytest.mark.filterwarnings(
    'ignore:(Using torch.cross|torch.chain_matmul is deprecated)')
@needs_half
def test_the_emulation_agrees_with_itself():
    found = list(gpu_agreement.compare_operations('cpu'))
    assert len(found) > 100
    assert [name for name, difference in found if difference] == []


@pytest.mark.parametrize('theirs, found', [
    (torch.ones(3), 'dtype'),
    (torch.tensor([1., 2., math.inf]).half(), '1 of 3 non-finite'),
    (torch.tensor([1., 2., 3.1]).half(), 'off by'),
    (torch.tensor([1., 2., 3.]).half(), ''),
])
def test_a_disagreement_is_seen(theirs, found):
    ours = torch.tensor([1., 2., 3.]).half()
    said = gpu_agreement.difference(ours, theirs, 1e-3)
    assert found in said and bool(said) == bool(found)


def test_an_operation_that_only_one_side_refuses_is_seen(monkeypatch):

    def call(x):
        if not autocast_is_on():
            raise RuntimeError('not here')
        return x

    monkeypatch.setattr(gpu_agreement, 'listed_operations',
                        lambda: [('one', call, (torch.ones(2), ))])
    monkeypatch.setattr(gpu_agreement, 'mmcv_operations', list)
    import contextlib
    monkeypatch.setattr(gpu_agreement, 'region', lambda device: (
        contextlib.nullcontext() if device == 'meta' else
        gpu_agreement.cuda_autocast()))
    ((name, said), ) = gpu_agreement.compare_operations('meta')
    assert name == 'one' and 'not here' in said


@pytest.mark.skipif(torch.cuda.is_available(), reason='needs no GPU')
def test_without_a_gpu_it_says_so_and_passes():
    done = subprocess.run([sys.executable, 'bench/claims/gpu_agreement.py'],
                          cwd=ROOT, text=True, capture_output=True,
                          timeout=120)
    assert done.returncode == 0
    assert 'no CUDA device' in done.stdout.splitlines()[-1]


def test_losses_and_gradients_of_a_detector():
    model = families.build('retinanet')
    first, again = (dict(gpu_agreement.losses_and_gradients(model, 'cpu'))
                    for _ in range(2))
    assert {'loss loss_cls', 'gradient of bbox_head',
            'gradient of backbone'} <= set(first)
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_what_a_healthy_step_of_a_detector_costs():
    """The same reads as stock, one percent more operations at most."""
    from mmdet.testing import demo_mm_inputs
    from mmdet.utils import register_all_modules
    from stock import stock_on_cpu
    register_all_modules()
    batch = demo_mm_inputs(2, (3, 240, 320), num_items=[5, 5], num_classes=3)
    with stock_on_cpu():
        model = measuring.detector()
        counts = []
        for kind, settings in (
                ('AmpOptimWrapper', {}),
                ('NanSafeAmpOptimWrapper', dict(nanfix=dict(fp32=None)))):
            side = overhead.Side(model, kind, **settings)
            torch.manual_seed(0)
            side.step(batch)
            with measuring.Calls() as calls:
                side.step(batch)
            counts.append(calls)
    stock, ours = counts
    assert ours.reads == stock.reads > 10
    assert stock.total > 3000
    assert ours.total <= 1.01 * stock.total
    # One copy of the buffers, and of what the last step left on modules.
    copied = side.wrapper.guard.parts.transaction.backup.nbytes
    buffers = sum(buffer.nbytes for buffer in side.model.buffers())
    assert buffers <= copied <= buffers + 2**16


def test_a_read_is_counted():
    with measuring.Calls() as calls:
        torch.ones(2).sum().item()
    assert calls.reads == 1 and calls.total >= 3


def test_detectors_in_half_precision():
    """The story of its users: which heads, why, and what scale fits."""
    import detectors_fp16
    made, scale, (incident, ) = detectors_fp16.guarded(
        detectors_fp16.build(), steps=1)
    assert incident['heads']['rpn_head']['bad_grads'] == []
    for stage in range(3):
        assert incident['heads'][f'roi_head.bbox_head.{stage}']['bad_grads']
    assert incident['where']['phase'] == 'backward'
    assert incident['where']['head'].startswith('roi_head.bbox_head.')
    assert incident['where']['module'].endswith('.fc_cls')
    assert incident['cause']['code'] == 'NF101'
    assert f'at loss scale {scale:g} it does not come' in (
        incident['cause']['evidence'][0])
    assert incident['cause']['config_patch'] == (
        f'optim_wrapper = dict(nanfix=dict(init_scale={scale}))')
    assert scale == 16. and made == 0


@pytest.mark.parametrize('layers', [False, True])
def test_the_begin_of_a_step_does_not_walk_through_the_model(layers):
    """Functions that Python calls, whatever the number of modules."""

    def calls(modules):
        model = begin_cost.model_of(modules, layers)
        transaction = Transaction(model, (), StateTree(model).snapshot)
        seen = []
        for step in range(4):
            if step == 3:
                sys.setprofile(lambda frame, event, argument: seen.append(
                    event) if event == 'call' else None)
            transaction.begin()
            sys.setprofile(None)
            transaction.commit()
        return len(seen)

    assert calls(30) == calls(300) < 150
    whole, begin, _ = begin_cost.costs(begin_cost.model_of(600, layers), 7)
    assert begin < whole / 2
