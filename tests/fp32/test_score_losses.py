"""Every loss and matching cost of mmdet against its own formula in fp64.

Inputs are those of ``bench/lib/loss_inputs.py``: rounded to half or bfloat16,
so that the reference sees the same numbers.
"""
from __future__ import annotations

import inspect
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from loss_inputs import COSTS, LOSSES, every, rounded
from mmdet.models import losses as host
from mmdet.models.task_modules.assigners import HungarianAssigner
from mmdet.registry import MODELS as MMDET
from mmdet.registry import TASK_UTILS
from torch import nn

from mmdet_nanfix import losses
from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.fp32 import regions, score_losses

HALVES = [torch.float16, torch.bfloat16]
DOUBLE, SINGLE = torch.float64, torch.float32
OURS = losses.register_losses()
META = dict(img_shape=(4000, 4000))
# Where the reference itself is not finite, ours is.
NOT_FINITE = {
    ('SIoULoss', 'no size, identical'), ('SIoULoss', 'no width, identical'),
    ('SIoULoss', 'inside out, around')}


def in_fp64():
    """Some formulas call ``float()`` on what they get."""
    return mock.patch.object(torch.Tensor, 'float', torch.Tensor.double)


def total(out):
    if isinstance(out, dict):
        out = tuple(out.values())
    return sum(map(total, out)) if isinstance(out, tuple) else out.sum()


def evaluate(module, args, **kwargs):
    """Value, and gradient at the prediction, which is not written to."""
    pred, *rest = args
    pred = pred.detach().requires_grad_()
    out = total(module(pred * 1, *rest, **kwargs))
    if not out.requires_grad:
        return out.double(), torch.zeros_like(pred).double()
    out.backward()
    return out.detach().double(), pred.grad.double()


def assert_close(own, wanted, scale=1.):
    """To 1e-5 of the largest entry; what is below fp32's steps is 0."""
    for ours, theirs, least in zip(own, wanted, (2e-7, 1e-8)):
        assert ours.isfinite().all()
        if theirs.numel():
            limit = 1e-5 * theirs.abs().max() + least * scale
            assert (ours - theirs).abs().max() <= limit, (ours, theirs)


def factors(kind, options):
    """Values of ``avg_factor``, each with what the result is divided by."""
    yield {}, 1.
    if 'avg_factor' in inspect.signature(kind.forward).parameters and (
            'use_mask' not in options and kind not in (
                host.L2Loss, host.MarginL2Loss, host.EQLV2Loss)):
        for factor in (7., 0., torch.tensor(0.)):
            yield dict(avg_factor=factor), float(factor) + 1.2e-7


@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('name, options, inputs', LOSSES, ids=[
    f'{name}-{"-".join(options)}' for name, options, _ in LOSSES])
def test_losses(name, options, inputs, dtype):
    kind, ours = MMDET.get(name), OURS[f'Fp32{name}']
    cases = [(case, some) for case in every(((name, options, inputs), ))
             for some in factors(kind, options)]
    for (_, _, called, args), (factor, divisor) in cases:
        pred, *rest = rounded(args, dtype)
        factor = {key: rounded(value, dtype)
                  for key, value in factor.items()}
        with in_fp64():
            wanted = evaluate(
                kind(**options).double(), rounded((pred, *rest), DOUBLE),
                **{key: rounded(value, DOUBLE)
                   for key, value in factor.items()})
        for others in (rest, rounded(rest, SINGLE)):
            with cuda_autocast(dtype):
                own = evaluate(ours(**options), (pred.float(), *others),
                               **factor)
                direct = total(ours(**options)(pred * 1, *others, **factor))
            assert direct.dtype == SINGLE
            assert torch.equal(direct.double(), own[0])
            if called == 'empty' or (name, called) in NOT_FINITE:
                assert own[0].isfinite() and own[1].isfinite().all()
                assert not wanted[0].isfinite() or (
                    own[0] - wanted[0]).abs() <= 1e-5
            else:
                assert wanted[0].isfinite(), called
                assert_close(own, wanted, 1. / divisor)


def test_every_loss_is_in_the_sweep():
    assert {f'Fp32{name}' for name, _, _ in LOSSES} == set(OURS)


class Head(nn.Module):
    """Holds an assigner with a matching cost."""

    def __init__(self, cost):
        super().__init__()
        self.assigner = HungarianAssigner([cost])


@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('name, options, inputs', COSTS, ids=[
    f'{name}-{"-".join(options)}' for name, options, _ in COSTS])
def test_matching_costs(name, options, inputs, dtype):
    head = Head(dict(type=name, **options))
    (cost, ) = head.assigner.match_costs
    regions.install(head, mend_cost=score_losses.exact_cost)
    for _, _, _, args in every(((name, options, inputs), )):
        half = rounded(args, dtype)
        with in_fp64():
            wanted = cost(*rounded(half, DOUBLE), img_meta=META)
        with cuda_autocast(dtype), regions.switched('heads', 'cpu'):
            for others in (half[1], rounded(half[1], SINGLE)):
                own = cost(half[0], others, img_meta=META)
                assert own.dtype == SINGLE
                assert_close((own.double(), ), (wanted, ))


def test_every_matching_cost_is_in_the_sweep():
    from mmdet.models.task_modules.assigners import match_cost
    named = {name for name, kind in TASK_UTILS.module_dict.items()
             if issubclass(kind, match_cost.BaseMatchCost)}
    assert {name for name, _, _ in COSTS} == named


numbers = st.one_of(st.floats(-65504., 65504., width=16),
                    st.floats(.125, 4096., width=32))
near = st.sampled_from([0., 0.5, 100., 100.5, 1000., 4000.])
boxes = st.lists(st.tuples(*[st.one_of(near, numbers)] * 8), min_size=1,
                 max_size=4)
BOX_LOSSES = sorted({
    f'Fp32{name}' for name, _, inputs in LOSSES
    if inputs is dict((n, i) for n, _, i in LOSSES)['GIoULoss']})


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(boxes)
@pytest.mark.parametrize('name', BOX_LOSSES)
def test_box_losses_are_finite_and_equal_the_hosts_where_that_is(
        name, pairs):
    pairs = torch.tensor(pairs, dtype=SINGLE)
    theirs = MMDET.get(name[len('Fp32'):])(reduction='none')
    ours = OURS[name](reduction='none')
    for pair in pairs.unbind():
        pred, target = pair[None, :4], pair[None, 4:]
        own, wanted = evaluate(ours, (pred, target)), evaluate(
            theirs, (pred, target))
        assert own[0].isfinite() and own[1].isfinite().all()
        if wanted[0].isfinite():
            assert (own[0] - wanted[0]).abs() <= 1e-5 * (
                1 + wanted[0].abs())


@pytest.mark.parametrize('name', BOX_LOSSES)
@pytest.mark.parametrize('size', [1., 50., 1000.])
def test_gradients_of_box_losses_are_the_hosts(name, size):
    """Boxes that half cannot hold, and ones that share a centre or a side."""
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(400, 2, generator=generator) * size
    side = (torch.rand(400, 2, generator=generator) + .1) * size
    target = torch.cat([corner, corner + side], 1)
    moved = target + (torch.rand(400, 4, generator=generator) - .5) * (
        .2 * size)
    for pred in (moved, target, target + .1 * size * torch.tensor(
            [-1., 0., 1., 0.])):
        theirs = MMDET.get(name[len('Fp32'):])(reduction='none')
        own = evaluate(OURS[name](reduction='none'), (pred, target))[1]
        wanted = evaluate(theirs, (pred, target))[1]
        fine = wanted.isfinite()
        limit = 2e-4 * (wanted[fine].abs() + 1 / size)
        assert ((own[fine] - wanted[fine]).abs() <= limit).all()


def test_coinciding_boxes_of_any_place():
    """Shifted by a last place: IoU rounds to 1, the term to 0."""
    pred = torch.tensor([[0., 0., 4000., 4000.]])
    target = pred + torch.tensor([1e-4, 0., 1e-4, 0.])
    assert not torch.equal(pred, target)
    assert host.CIoULoss()(pred, target).isnan()
    value, gradient = evaluate(OURS['Fp32CIoULoss'](), (pred, target))
    assert value.abs() < 1e-6 and gradient.isfinite().all()


def test_quotients_by_zero():
    zero = torch.zeros(1)
    target = torch.tensor([[0., 0., 10., 10.]])
    # A width of -eps: the denominator is exactly 0.
    pred = torch.tensor([[0.001, 0., 0., 10.]])
    assert (pred[:, 2] - pred[:, 0] + 1e-3 == zero).all()
    assert evaluate(host.BoundedIoULoss(), (pred, target))[1].isnan().any()
    value, gradient = evaluate(OURS['Fp32BoundedIoULoss'](), (pred, target))
    assert value.isfinite() and gradient.isfinite().all()


def test_a_loss_of_nothing_keeps_its_graph():
    pred = torch.zeros(0, 4, requires_grad=True)
    for name in ('GIoULoss', 'IoULoss'):
        assert MMDET.get(name)()(pred, pred.detach()).isnan()
        out = OURS[f'Fp32{name}']()(pred, pred.detach())
        assert out == 0 and out.requires_grad
    seesaw = OURS['Fp32SeesawLoss'](num_classes=4)
    out = seesaw(torch.zeros(0, 6, requires_grad=True),
                 torch.zeros(0, dtype=torch.long))
    assert all(value == 0 and value.requires_grad for value in out.values())


def test_a_fork_with_other_names_keeps_its_own_formula():

    class CIoULoss(nn.Module):

        def forward(self, pred, target):
            return (pred - target).abs().sum()

    CIoULoss.forward.__qualname__ = 'CIoULoss.forward'
    CIoULoss.forward.__module__ = 'mmdet.models.losses.fork'
    assert 'ciou_loss' not in CIoULoss.forward.__globals__
    own = score_losses.finite_forward(CIoULoss.forward)
    pred = torch.ones(2, 4)
    assert own(CIoULoss(), pred, pred * 3) == 16


def test_what_is_not_mdets_is_left():
    assert score_losses.exact_cost(Head.__init__) is None


def test_labels_that_are_no_class_are_background():
    logits = torch.randn(3, 4)
    loss = OURS['Fp32FocalLoss'](reduction='none')
    background = loss(logits, torch.tensor([4, 4, 4]))
    for label in (-1, 5, 255):
        assert torch.equal(loss(logits, torch.full((3, ), label)),
                           background)


@pytest.mark.parametrize('weight', [
    None, torch.rand(5), torch.rand(5, 4), torch.rand(20)])
def test_focal_loss_is_the_formula_of_the_host(weight):
    labels = torch.tensor([0, 3, 4, 1, 2])
    logits = torch.randn(5, 4)
    for settings in ({}, dict(gamma=1.5, alpha=.6, loss_weight=3.)):
        for call in ({}, dict(avg_factor=3.), dict(
                reduction_override='none'), dict(reduction_override='sum')):
            found = [evaluate(kind(**settings), (logits, labels, weight),
                              **call)
                     for kind in (OURS['Fp32FocalLoss'], host.FocalLoss)]
            for own, theirs in zip(*found):
                torch.testing.assert_close(own, theirs, rtol=1e-4,
                                           atol=1e-6)
            # A target that is one-hot already is the host's own affair.
            hot = torch.eye(5)[labels][:, :4]
            assert torch.equal(*(evaluate(
                kind(**settings), (logits, hot, weight), **call)[0]
                for kind in (OURS['Fp32FocalLoss'], host.FocalLoss)))


def test_focal_loss_keeps_logits_and_labels_alone():
    """As mmcv's kernel does; a label a score, or 0 to 255 classes of it."""
    kept = []

    def keep(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    logits = torch.randn(1000, 80, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda same: same):
        OURS['Fp32FocalLoss']()(logits, torch.zeros(1000).long(),
                                avg_factor=1.)
    assert sum(kept) <= 1000 * 80 * (4 + 1) + 1000


def test_a_loss_of_ones_own_is_not_mended():

    class OwnLoss(nn.Module):

        def forward(self, positive, negative):
            return (positive.sum() + negative.sum()) / positive.numel()

    assert score_losses.finite_forward(OwnLoss.forward) is OwnLoss.forward
