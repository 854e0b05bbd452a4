from __future__ import annotations

import math

import pytest
import torch
from helpers.guards import parts_of
from helpers.torch_features import needs_half
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmdet_nanfix.diagnosis.findings import Failure
from mmdet_nanfix.diagnosis.replay.call_site import CallSites
from mmdet_nanfix.diagnosis.replay.probe import NonFiniteTracer
from mmdet_nanfix.diagnosis.replay.replayer import FillGauge, Replayer
from mmdet_nanfix.diagnosis.replay.request import ReplayRequest
from mmdet_nanfix.guard import CapturedForward, PlainTrainer
from mmdet_nanfix.guard.state import BatchSnapshot, Rng


class Noisy(nn.Module):
    """Draws numbers, keeps statistics and attributes, may fail."""

    def __init__(self):
        super().__init__()
        self.bbox_head = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout(.5)
        self.register_buffer('mean', torch.zeros(2))
        self.seen = []

    def forward(self, x, how='fine'):
        self.seen.append(x)
        y = self.drop(self.norm(self.bbox_head(x)))
        if how == 'memory':
            raise torch.cuda.OutOfMemoryError('CUDA out of memory')
        if how == 'raise':
            bad = y.sum() * math.inf
            cost = bad - bad
            if not torch.isfinite(cost):
                raise ValueError('no matching')
        if how == 'loss':
            y = y - y.log()
        if how == 'grads':
            y = y + (self.bbox_head.weight * 0).sqrt().sum()
        if how == 'buffer':
            self.mean.add_(math.inf)
        return {'loss_cls': y.mean(), 'acc': y.detach().max()}


def setup(**arguments):
    model = Noisy()
    x = torch.randn(4, 2)
    batch = {'x': x, **arguments}
    forward = CapturedForward(BatchSnapshot(batch), Rng(), False)
    losses = []

    replayer = Replayer(parts_of(model))
    original = model.forward

    def spy(*args, **kwargs):
        out = original(*args, **kwargs)
        losses.append(out['loss_cls'].item())
        return out

    model.forward = spy

    def run(probe=False, **settings):
        made = NonFiniteTracer(CallSites(model), lambda: (None, 0)) if (
            probe) else None
        return replayer.run(forward, batch, 8., made, **settings)

    return model, run, losses


def test_a_replay_is_the_same_to_the_last_bit_and_leaves_nothing():
    model, run, losses = setup()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    torch.rand(3)
    now = torch.get_rng_state()
    for probe in (False, True, False):
        assert run(probe).failed is None
    assert len(set(losses)) == 1
    assert torch.equal(torch.get_rng_state(), now)
    assert not torch.equal(now, drawn)
    assert all(torch.equal(value, state[key])
               for key, value in model.state_dict().items())
    assert model.seen == []
    assert all(p.grad is None for p in model.parameters())
    assert not model._forward_hooks


@pytest.mark.parametrize('how, failed, op', [
    ('loss', 'loss', 'log'), ('grads', 'grads', 'sqrt'),
    ('raise', 'raised', 'mul'), ('buffer', 'buffers', 'add_')])
def test_each_way_to_fail_is_told_with_its_origin(how, failed, op):
    _, run, _ = setup(how=how)
    assert run().failed is Failure(failed)
    result = run(probe=True)
    assert result.failed is Failure(failed)
    if how in ('raise', 'buffer'):
        # An infinity that was asked for, for want of anything else.
        assert [record.meant for record in result.origins] == (
            [False] if how == 'raise' else [True])
    else:
        assert [record.op for record in result.origins] == [op]
    assert result.error is None


def test_no_memory_is_said_and_is_no_failure():
    model, run, _ = setup(how='memory')
    for probe in (False, True):
        result = run(probe)
        assert result.error == 'ran out of memory'
        assert result.failed is None
    assert model.seen == []


def test_the_place_of_a_loss_is_told():
    _, run, _ = setup()
    sites = run(probe=True).owners['loss_cls']
    assert sites and sites[0].source.startswith(__file__)


def test_a_loss_that_is_bad_goes_back_only_where_asked():
    model, run, _ = setup(how='loss')
    went = []
    model.bbox_head.weight.register_hook(went.append)
    run()
    assert not went
    run(backward=True)
    assert len(went) == 1


def test_a_training_step_is_run_by_the_host():
    model, _, _ = setup()
    seen = []

    class Stepping(PlainTrainer):

        def replay(self, forward, batch, on_loss, precision=()):
            seen.append((batch, forward.whole_step, precision))
            on_loss(model(batch['x'])['loss_cls'] / 0.)

    replayer = Replayer(parts_of(model, Stepping(model)))
    batch = {'x': torch.ones(4, 2)}
    result = replayer.run(
        CapturedForward(BatchSnapshot(batch), Rng(), True), batch, 1.,
        asked=ReplayRequest(precision=('heads', )))
    assert result.failed == 'loss' and seen == [(batch, True, ('heads', ))]


@pytest.mark.parametrize('how, until, failed', [
    ('grads', 'loss', None), ('loss', 'raised', None), ('loss', 'loss',
                                                        'loss'),
    ('buffer', 'loss', None), ('grads', 'grads', 'grads')])
def test_nothing_is_looked_at_after_what_is_asked_about(how, until, failed):
    model, run, _ = setup(how=how)
    went = []
    model.bbox_head.weight.register_hook(went.append)
    found = run(asked=ReplayRequest(until=Failure(until))).failed
    assert found == failed
    assert bool(went) is (until == 'grads')


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_the_largest_gradient_as_a_share_of_the_range(dtype):
    largest = torch.finfo(dtype).max
    x = torch.ones(3, requires_grad=True)
    with FillGauge() as gauge:
        # The middle one is the largest on the way.
        (x.to(dtype) * .25).sum().backward(torch.tensor(
            largest / 2, dtype=dtype))
    assert gauge.filled == pytest.approx(.5, rel=1e-2)


def test_nothing_in_half_fills_nothing():
    x = torch.ones(3, requires_grad=True)
    with FillGauge() as gauge:
        (x * 1e30).sum().backward()
    assert gauge.filled == 0.


def test_an_infinity_is_more_than_all():
    x = torch.ones(3, requires_grad=True)
    with FillGauge() as gauge:
        (x.half() * 4).sum().backward(torch.tensor(6e4).half())
    assert gauge.filled == float('inf')


@needs_half
@pytest.mark.parametrize('reentrant', [False, True])
def test_what_is_computed_again_is_no_gradient(reentrant):
    x = torch.ones(3, requires_grad=True)

    def layer(y):
        return (y.half() * 6e4).float() * 1e-5

    loss = checkpoint(layer, x, use_reentrant=reentrant).sum()
    with FillGauge() as gauge:
        loss.backward()
    assert 0 < gauge.filled < .1
