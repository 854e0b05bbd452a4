from __future__ import annotations

import copy
import inspect
import math
import pickle

import pytest
import torch
from mmdet.models import losses as host
from mmdet.registry import MODELS as MMDET
from mmengine.registry import MODELS
from torch import nn

from mmdet_nanfix import losses
from mmdet_nanfix.emulation import cuda_autocast

OURS = losses.register_losses()
HALVES = [torch.float16, torch.bfloat16]


def test_every_registered_loss_has_one():
    names = {name for name, kind in vars(host).items()
             if isinstance(kind, type) and MMDET.get(name) is kind}
    assert len(names) == 30
    assert set(OURS) == {f'Fp32{name}' for name in names}
    for name, kind in OURS.items():
        # Through a child registry as well.
        assert MODELS.get(name) is kind and MMDET.get(name) is kind


@pytest.mark.parametrize('name', sorted(OURS))
def test_it_is_the_original_but_for_its_forward(name):
    kind, original = OURS[name], MMDET.get(name[len('Fp32'):])
    assert issubclass(kind, original)
    assert inspect.signature(kind.__init__) == inspect.signature(
        original.__init__)
    assert inspect.signature(kind.forward) == inspect.signature(
        original.forward)
    needed = dict(num_classes=4) if 'num_classes' in inspect.signature(
        original.__init__).parameters else {}
    ours, theirs = MODELS.build(dict(type=name, **needed)), original(**needed)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert {key for key in vars(ours) if not key.startswith('_')} == {
        key for key in vars(theirs) if not key.startswith('_')}
    assert type(copy.deepcopy(ours)) is kind
    if name != 'Fp32EQLV2Loss':
        # The original keeps a function that cannot be pickled.
        assert type(pickle.loads(pickle.dumps(ours))) is kind


def boxes(count, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * 200
    size = torch.rand(count, 2, generator=generator) * 100 + 20
    return torch.cat([corner, corner + size], 1).to(dtype)


def numbers(*shape, scale=1., seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).double() * scale


LABELS = torch.tensor([0, 1, 2, 3, 1])
# Arguments of the class, and of a call: the prediction first.
CASES = {
    'BalancedL1Loss': ({}, (numbers(5, 4, scale=50), numbers(5, 4, seed=1))),
    'BoundedIoULoss': ({}, (boxes(5), boxes(5, seed=1))),
    'CIoULoss': ({}, (boxes(5), boxes(5, seed=1))),
    'CrossEntropyLoss': ({}, (numbers(5, 4, scale=9), LABELS)),
    'DIoULoss': ({}, (boxes(5), boxes(5, seed=1))),
    'DiceLoss': (dict(use_sigmoid=True), (
        numbers(3, 40, scale=9), (numbers(3, 40, seed=1) > 0).double())),
    'DistributionFocalLoss': ({}, (
        numbers(5, 8, scale=9), torch.linspace(0., 6.5, 5).double())),
    'EIoULoss': ({}, (boxes(5), boxes(5, seed=1))),
    'FocalLoss': ({}, (numbers(5, 4, scale=9), LABELS)),
    'GHMC': ({}, (numbers(5, 4, scale=9), LABELS, torch.ones(5).double())),
    'GHMR': ({}, (numbers(5, 4), numbers(5, 4, seed=1),
                  torch.ones(5, 4).double())),
    'GIoULoss': ({}, (boxes(5), boxes(5, seed=1))),
    'GaussianFocalLoss': ({}, (
        numbers(1, 2, 4, 4).sigmoid(),
        numbers(1, 2, 4, 4, seed=1).sigmoid())),
    'IoULoss': ({}, (boxes(5), boxes(5) + 3)),
    'KnowledgeDistillationKLDivLoss': ({}, (
        numbers(5, 4, scale=9), numbers(5, 4, scale=9, seed=1))),
    'L1Loss': ({}, (numbers(5, 4, scale=300), numbers(5, 4, seed=1))),
    'MSELoss': ({}, (numbers(5, 4, scale=300), numbers(5, 4, seed=1))),
    'QualityFocalLoss': ({}, (numbers(5, 4, scale=9), (
        LABELS, torch.linspace(.1, .9, 5).double()))),
    'SIoULoss': ({}, (boxes(5), boxes(5, seed=1))),
    'SmoothL1Loss': ({}, (numbers(5, 4, scale=300), numbers(5, 4, seed=1))),
    'VarifocalLoss': ({}, (numbers(5, 4, scale=9),
                           numbers(5, 4, seed=1).sigmoid())),
}


def to(dtype, value):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return tuple(to(dtype, item) for item in value)


def value_and_gradient(module, pred, rest, **kwargs):
    """The gradient is taken at the fp32 (or fp64) copy."""
    pred = pred.detach().requires_grad_()
    wide = pred if pred.dtype == torch.float64 else pred.float()
    wide = wide.detach().requires_grad_()
    out = module(wide, *rest, **kwargs)
    out.sum().backward()
    return out.detach().double(), wide.grad.double()


@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('name', sorted(CASES))
def test_values_and_gradients_are_those_of_fp64(name, dtype):
    options, (pred, *rest) = CASES[name]
    pred, rest = to(dtype, pred), to(dtype, tuple(rest))
    original = MMDET.get(name)(**options)
    ours = OURS[f'Fp32{name}'](**options)
    wanted = value_and_gradient(original, pred.double(),
                                to(torch.float64, rest))
    with cuda_autocast(dtype):
        # In half, and mixed with fp32 targets.
        for others in (rest, to(torch.float32, rest)):
            direct = ours(pred, *others)
            assert direct.dtype == torch.float32
            value, gradient = value_and_gradient(ours, pred, others)
            assert torch.equal(direct.double(), value)
            torch.testing.assert_close(value, wanted[0], rtol=1e-5,
                                       atol=1e-7)
            torch.testing.assert_close(gradient, wanted[1], rtol=1e-4,
                                       atol=1e-6)


@pytest.mark.parametrize('logit', [8.4, 20., 60., -60.])
def test_focal_loss_where_its_half_kernel_is_not_finite(logit):
    logits, labels = torch.full((1, 2), logit).half(), torch.tensor([0])
    wanted = host.FocalLoss()(logits.double(), labels)
    with cuda_autocast():
        assert not host.FocalLoss()(logits, labels).isfinite()
        ours = OURS['Fp32FocalLoss']()(logits, labels)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=0)


def test_focal_loss_where_its_fp32_kernel_is_wrong():
    """log(1 - p) of a rounded p is log(FLT_MIN), whatever the logit."""
    labels = torch.tensor([1])
    for logit in (16., 20., 60.):
        logits = torch.tensor([[logit, 0.]])
        wanted = host.FocalLoss(reduction='none')(logits.double(), labels)
        with cuda_autocast(), torch.autocast('cuda', enabled=False):
            kernel = host.FocalLoss(reduction='none')(logits, labels)
            ours = OURS['Fp32FocalLoss'](reduction='none')(logits, labels)
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=0)
        off = abs(kernel[0, 0].item() / wanted[0, 0].item() - 1)
        assert off > .4 if logit > 17 else off < .1


def test_an_empty_batch_and_background():
    loss = OURS['Fp32FocalLoss']()
    with cuda_autocast():
        out = loss(torch.zeros(0, 4).half(), LABELS[:0], avg_factor=1.)
        assert out.item() == 0
        # The label of the background is the number of classes.
        out = loss(torch.zeros(5, 4).half(), LABELS * 0 + 4)
    assert out.item() == pytest.approx(
        host.FocalLoss()(torch.zeros(5, 4), LABELS * 0 + 4).item())


@pytest.mark.parametrize('factor', [
    2., torch.tensor(2.), torch.tensor(2.).half()])
def test_weight_and_avg_factor(factor):
    pred, target = numbers(5, 4).half(), numbers(5, 4, seed=1).half()
    weight = torch.ones(5, 4).half()
    with cuda_autocast():
        out = OURS['Fp32SmoothL1Loss']()(pred, target, weight,
                                         avg_factor=factor)
    wanted = host.SmoothL1Loss()(pred.float(), target.float(),
                                 weight.float(), avg_factor=2.)
    assert out.dtype == torch.float32 and torch.equal(out, wanted)


def test_a_written_attribute_counts():
    loss = MODELS.build(dict(type='Fp32SmoothL1Loss', beta=1.))
    pred, target = torch.tensor([[2.]]), torch.zeros(1, 1)
    first = loss(pred, target)
    loss.beta = 4.
    assert loss(pred, target) != first
    assert isinstance(loss, host.SmoothL1Loss)


def test_a_loss_of_ones_own():

    class OwnLoss(nn.Module):

        def __init__(self, weight=2.):
            super().__init__()
            self.weight = weight

        def forward(self, pred, target):
            return (pred - target).square().sum() * self.weight

    kind = losses.fp32_class(OwnLoss)
    assert kind.__name__ == 'Fp32OwnLoss' and kind().weight == 2.
    pred = torch.full((1, ), 300.).half()
    with cuda_autocast():
        assert math.isinf((pred * pred).item())
        assert kind()(pred, pred * 0).item() == 180000.


def test_registering_twice_keeps_the_classes():
    assert losses.register_losses() == OURS
