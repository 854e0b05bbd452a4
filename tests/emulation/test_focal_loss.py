from __future__ import annotations

import math

import pytest
import torch
from mmcv.ops import (
    sigmoid_focal_loss,
)
from mmdet.models.losses import FocalLoss

from mmdet_nanfix.emulation import cuda_autocast


@pytest.mark.parametrize('logit, positive, negative', [
    (0., 0.0433, 0.13), (8.25, None, None), (8.4, math.nan, math.inf),
    (20., math.nan, math.inf), (-16., None, None),
    (-18., math.inf, math.nan), (-60., math.inf, math.nan)])
def test_focal_loss_has_the_faults_of_cudas_half_kernel(logit, positive,
                                                        negative):
    pred = torch.full((1, 2), logit)
    target = torch.tensor([0])
    with cuda_autocast():
        half = FocalLoss(reduction='none')(pred.half(), target)
    assert half.dtype == torch.float16
    for got, want in zip(half[0].tolist(), (positive, negative)):
        if want is None:
            assert math.isfinite(got)
        elif math.isfinite(want):
            assert got == pytest.approx(want, rel=2e-2)
        else:
            assert str(got) == str(want)


def test_focal_loss_in_fp32_is_the_formula_with_gradients():
    torch.manual_seed(0)
    pred = torch.randn(6, 4) * 4
    target = torch.tensor([0, 1, 2, 3, 4, 4])
    grads, values = [], []
    for emulate in (False, True):
        x = pred.clone().requires_grad_()
        if emulate:
            with cuda_autocast():
                loss = FocalLoss()(x, target, avg_factor=3.)
        else:
            loss = FocalLoss()(x, target, avg_factor=3.)
        loss.backward()
        values.append(loss.detach())
        grads.append(x.grad)
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_weighted_focal_loss():
    pred, target = torch.randn(3, 2), torch.tensor([0, 1, 0])
    weight = torch.tensor([1., 3.])
    with cuda_autocast():
        weighted, plain = (sigmoid_focal_loss(pred, target, 2., .25, given,
                                              'none')
                           for given in (weight, None))
    torch.testing.assert_close(weighted, plain * weight[target][:, None])


def test_the_kernel_does_not_depend_on_autocast():
    """In a region with autocast off half inputs take the half kernel."""
    pred, target = torch.full((1, 2), 20.).half(), torch.tensor([0])
    with cuda_autocast(), torch.autocast('cuda', enabled=False):
        out = FocalLoss(reduction='none')(pred, target)[0].tolist()
    assert list(map(str, out)) == ['nan', 'inf']
