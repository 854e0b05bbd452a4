from __future__ import annotations

import math

import pytest
import torch
from mmcv.ops import (
    DeformConv2d,
    ModulatedDeformConv2d,
    RoIAlign,
    batched_nms,
    box_iou_rotated,
    nms,
    nms_rotated,
    sigmoid_focal_loss,
)
from mmcv.utils import ext_loader
from mmdet.models.losses import FocalLoss

from mmdet_nanfix.emulation import cuda_autocast, mmcv_ops

HALF = torch.float16


def test_max_pooling_writes_its_argmax_back():
    features = torch.randn(1, 2, 8, 8).half().requires_grad_()
    wide = features.detach().float().requires_grad_()
    rois = torch.tensor([[0., 1, 1, 6, 6]])
    align = RoIAlign((2, 2), sampling_ratio=2, pool_mode='max')
    align(features, rois.half()).sum().backward()
    align(wide, rois).sum().backward()
    torch.testing.assert_close(features.grad.float(), wide.grad, rtol=2e-3,
                               atol=2e-3)


def boxes_and_scores():
    torch.manual_seed(0)
    corner = torch.rand(30, 2) * 20
    return torch.cat([corner, corner + 5 + torch.rand(30, 2) * 9], 1), \
        torch.rand(30).half()


def test_nms_takes_half_scores_as_cuda_does():
    boxes, scores = boxes_and_scores()
    _, kept = nms(boxes, scores, .5)
    assert torch.equal(kept, nms(boxes, scores.float(), .5)[1])
    batched_nms(boxes, scores, torch.zeros(30, dtype=torch.long),
                dict(type='nms', iou_threshold=.5))


def test_nms_refuses_half_boxes_as_cuda_does():
    # mmcv's CUDA kernel reads them as float: nms_cuda.cu, data_ptr<float>.
    boxes, scores = boxes_and_scores()
    with pytest.raises(RuntimeError, match='Float but found Half'):
        nms(boxes.half(), scores, .5)


def test_rotated_nms_takes_half_boxes_as_cuda_does():
    boxes, scores = boxes_and_scores()
    boxes = torch.cat([boxes, torch.rand(30, 1)], 1).half()
    dets, kept = nms_rotated(boxes, scores, .5)
    assert dets.dtype == HALF
    assert torch.equal(kept, nms_rotated(boxes.float(), scores.float(),
                                         .5)[1])


def test_voxelization_refuses_half_as_cuda_does():
    module = ext_loader.load_ext('_ext', ['dynamic_voxelize_forward'])
    points = torch.rand(4, 3).half()
    with cuda_autocast(), pytest.raises(RuntimeError, match='Half'):
        module.dynamic_voxelize_forward(
            points, torch.ones(3), torch.ones(6),
            torch.zeros(4, 3, dtype=torch.int), NDim=3)


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
    assert half.dtype == HALF
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
    weighted, plain = (sigmoid_focal_loss(pred, target, 2., .25, given,
                                          'none')
                       for given in (weight, None))
    torch.testing.assert_close(weighted, plain * weight[target][:, None])


@pytest.mark.parametrize('modulated', [False, True])
def test_deformable_convolutions_run_in_half(modulated):
    torch.manual_seed(0)
    kind = ModulatedDeformConv2d if modulated else DeformConv2d
    conv = kind(4, 4, 3, padding=1)
    offsets = torch.nn.Conv2d(4, 18, 3, padding=1)
    x = torch.randn(2, 4, 8, 8)
    mask = (torch.rand(2, 9, 8, 8), ) if modulated else ()
    with cuda_autocast():
        out = conv(x, offsets(x), *mask)
    assert out.dtype == HALF
    out.float().sum().backward()
    wanted = conv(x, offsets(x), *mask)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)
    assert torch.isfinite(conv.weight.grad).all()


def test_repeated_registration_and_fp32_calls_change_nothing():
    module = ext_loader.load_ext('_ext', ['roi_align_forward'])
    op = module.roi_align_forward
    mmcv_ops.emulate_ops()
    mmcv_ops.emulate_losses()
    assert module.roi_align_forward is op
    align = RoIAlign((2, 2))
    assert align(torch.rand(1, 1, 4, 4),
                 torch.tensor([[0., 0, 0, 3, 3]])).dtype == torch.float32
    loss = FocalLoss()(torch.full((1, 2), 20.), torch.tensor([0]))
    assert torch.isfinite(loss)


def test_the_kernel_does_not_depend_on_autocast():
    """In a region with autocast off half inputs take the half kernel."""
    pred, target = torch.full((1, 2), 20.).half(), torch.tensor([0])
    with cuda_autocast(), torch.autocast('cuda', enabled=False):
        out = FocalLoss(reduction='none')(pred, target)[0].tolist()
    assert list(map(str, out)) == ['nan', 'inf']


def test_bfloat16_is_refused_where_mmcv_has_no_kernel():
    pred, target = torch.zeros(1, 2).bfloat16(), torch.tensor([0])
    with cuda_autocast(torch.bfloat16), pytest.raises(
            RuntimeError, match='BFloat16'):
        FocalLoss()(pred, target)


def test_rotated_iou_takes_half():
    boxes = torch.tensor([[10., 10, 8, 4, 0], [10., 10, 8, 4, .5]])
    iou = box_iou_rotated(boxes.half(), boxes.half())
    assert iou.dtype == HALF
    torch.testing.assert_close(
        iou.float(), box_iou_rotated(boxes, boxes), rtol=1e-2, atol=1e-2)
