import math

import pytest
import torch
from mmcv.ops import (
    DeformConv2d,
    ModulatedDeformConv2d,
    RoIAlign,
    batched_nms,
    nms,
    nms_rotated,
    sigmoid_focal_loss,
)
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttention
from mmcv.utils import ext_loader
from mmdet.models.losses import FocalLoss

from mmdet_nanfix import mmcv_ops
from mmdet_nanfix.emulation import cuda_autocast

HALF = torch.float16


def native(name):
    """mmcv's own kernel, below ours."""
    return getattr(ext_loader.load_ext('_ext', [name]), name).__wrapped__


def smooth_features(count=2):
    torch.manual_seed(0)
    coarse = torch.randn(count, 3, 6, 8)
    return torch.nn.functional.interpolate(
        coarse, size=(48, 64), mode='bilinear').half()


def some_rois(batch=2):
    """Inside the frame, across its edges, outside of it, empty."""
    torch.manual_seed(1)
    rois = torch.rand(30, 5) * 150
    rois[:, 0] = (torch.arange(30) % batch).float()
    rois[:, 3:] = (rois[:, 1:3] + 8 + rois[:, 3:] / 3).clamp(max=190)
    rois[:5, 1:] += torch.tensor([-60., -60, 120, 120])
    rois[5, 1:] = torch.tensor([900., 900, 950, 950])
    rois[6, 3:] = rois[6, 1:3]
    return rois.half()


@pytest.fixture
def natively(monkeypatch):
    """Put mmcv's own RoIAlign kernels back."""

    def put_back():
        module = ext_loader.load_ext('_ext', ['roi_align_forward'])
        for name in ('roi_align_forward', 'roi_align_backward'):
            monkeypatch.setattr(module, name, native(name))

    return put_back


@pytest.mark.parametrize('sampling_ratio', [0, 2])
@pytest.mark.parametrize('aligned', [True, False])
def test_roi_align_is_the_half_kernel(sampling_ratio, aligned, natively,
                                      monkeypatch):
    """But for the rounding of sums: features reach 3, in steps of 2e-3."""
    monkeypatch.setattr(mmcv_ops, '_ROIS_AT_ONCE', 16)
    features, rois = smooth_features(), some_rois()
    align = RoIAlign((7, 5), 0.25, sampling_ratio, aligned=aligned)
    x = features.clone().requires_grad_()
    ours = align(x, rois)
    assert ours.dtype == HALF
    ours.sum().backward()
    natively()
    y = features.clone().requires_grad_()
    wanted = align(y, rois)
    wanted.sum().backward()
    error = (ours - wanted).abs().float()
    assert error.mean() < 3e-4 and error.max() < 1e-2
    assert (x.grad - y.grad).abs().float().mean() < 3e-3
    # What fp32 computes from the same RoIs is farther away.
    wide = align(features.float(), rois.float())
    assert (wide - wanted.float()).abs().mean() > 5 * error.mean()


def test_roi_align_at_a_coordinate_with_coarse_steps(natively):
    """Above 256 a half coordinate has steps of a quarter pixel."""
    features = torch.randn(1, 2, 8, 400).half()
    rois = torch.tensor([[0., 300.3, 1.2, 331.7, 6.1]]).half()
    align = RoIAlign((3, 3), 1.)
    ours = align(features, rois)
    natively()
    torch.testing.assert_close(ours, align(features, rois), rtol=2e-3,
                               atol=2e-3)


def test_roi_align_of_nothing_and_of_non_finite_rois():
    features = torch.ones(1, 2, 8, 8).half()
    align = RoIAlign((3, 3), 1.)
    assert align(features, torch.zeros(0, 5).half()).shape == (0, 2, 3, 3)
    for bad in (math.nan, math.inf):
        rois = torch.tensor([[0., 1, 1, bad, 5]]).half()
        assert align(features, rois).eq(0).all()
    # The CPU kernel refuses what ends before it begins; CUDA's does not.
    rois = torch.tensor([[0., 5, 5, 1, 1]]).half()
    assert align(features, rois).eq(0).all()
    # Fixed sampling goes to places that are no numbers, outside.
    rois = torch.tensor([[0., 1, 1, math.nan, 5]]).half()
    assert RoIAlign((3, 3), 1., 2)(features, rois).eq(0).all()


def test_a_bin_is_summed_before_it_is_divided():
    features = torch.full((1, 1, 8, 8), 20000.).half()
    rois = torch.tensor([[0., 1, 1, 6, 6]]).half()
    name = 'roi_align_forward'
    for ratio, wanted in ((1, 20000.), (2, math.inf)):
        align = RoIAlign((2, 2), 1., ratio)
        assert align(features, rois).unique().tolist() == [wanted]
        out, empty = torch.zeros(1, 1, 2, 2).half(), torch.zeros(0).half()
        native(name)(features, rois, out, empty, empty, aligned_height=2,
                     aligned_width=2, spatial_scale=1., sampling_ratio=ratio,
                     pool_mode=1, aligned=True)
        assert out.unique().tolist() == [wanted]


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


def test_deformable_attention_runs_in_half():
    torch.manual_seed(0)
    attention = MultiScaleDeformableAttention(
        embed_dims=8, num_heads=2, num_levels=1, num_points=2, dropout=0.,
        batch_first=True)
    shapes = torch.tensor([[4, 4]])
    query, value = torch.randn(1, 5, 8), torch.randn(1, 16, 8)
    seen = []
    attention.output_proj.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].dtype))

    def run():
        return attention(query, value=value, identity=torch.zeros(1, 5, 8),
                         reference_points=torch.rand(1, 5, 1, 2),
                         spatial_shapes=shapes,
                         level_start_index=torch.tensor([0]))

    torch.manual_seed(1)
    with cuda_autocast():
        half = run()
    torch.manual_seed(1)
    wide = run()
    assert seen == [HALF, torch.float32]
    torch.testing.assert_close(half, wide, rtol=5e-2, atol=5e-2)


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
