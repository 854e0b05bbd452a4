from __future__ import annotations

import math

import pytest
import torch
from helpers.torch_features import needs_half
from mmcv.ops import RoIAlign
from mmcv.ops import multi_scale_deform_attn as host
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttention
from mmcv.utils import ext_loader

from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.emulation import sampling as half_sampling

pytestmark = needs_half
HALF = torch.float16


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


def emulated(function, *args):
    """What it is in a region; outside it is mmcv's own."""
    with cuda_autocast():
        return function(*args)


@pytest.mark.parametrize('sampling_ratio', [0, 2])
@pytest.mark.parametrize('aligned', [True, False])
def test_roi_align_is_the_half_kernel(sampling_ratio, aligned, monkeypatch):
    """But for the rounding of sums: features reach 3, in steps of 2e-3."""
    monkeypatch.setattr(half_sampling, '_SAMPLES_AT_ONCE', 1000)
    features, rois = smooth_features(), some_rois()
    align = RoIAlign((7, 5), 0.25, sampling_ratio, aligned=aligned)
    x = features.clone().requires_grad_()
    ours = emulated(align, x, rois)
    assert ours.dtype == HALF
    ours.sum().backward()
    y = features.clone().requires_grad_()
    wanted = align(y, rois)
    wanted.sum().backward()
    error = (ours - wanted).abs().float()
    assert error.mean() < 3e-4 and error.max() < 1e-2
    assert (x.grad - y.grad).abs().float().mean() < 3e-3
    # What fp32 computes from the same RoIs is farther away.
    wide = align(features.float(), rois.float())
    assert (wide - wanted.float()).abs().mean() > 5 * error.mean()


def test_roi_align_at_a_coordinate_with_coarse_steps():
    """Above 256 a half coordinate has steps of a quarter pixel."""
    features = torch.randn(1, 2, 8, 400).half()
    rois = torch.tensor([[0., 300.3, 1.2, 331.7, 6.1]]).half()
    align = RoIAlign((3, 3), 1.)
    ours = emulated(align, features, rois)
    torch.testing.assert_close(ours, align(features, rois), rtol=2e-3,
                               atol=2e-3)


def test_roi_align_of_nothing_and_of_non_finite_rois():
    features = torch.ones(1, 2, 8, 8).half()
    align = RoIAlign((3, 3), 1.)
    assert emulated(
        align, features, torch.zeros(0, 5).half()).shape == (0, 2, 3, 3)
    for bad in (math.nan, math.inf):
        rois = torch.tensor([[0., 1, 1, bad, 5]]).half()
        assert emulated(align, features, rois).eq(0).all()
    # The CPU kernel refuses what ends before it begins; CUDA's does not.
    rois = torch.tensor([[0., 5, 5, 1, 1]]).half()
    assert emulated(align, features, rois).eq(0).all()
    # Fixed sampling goes to places that are no numbers, outside.
    rois = torch.tensor([[0., 1, 1, math.nan, 5]]).half()
    assert emulated(
        RoIAlign((3, 3), 1., 2), features, rois).eq(0).all()


def test_a_bin_is_summed_before_it_is_divided():
    features = torch.full((1, 1, 8, 8), 20000.).half()
    rois = torch.tensor([[0., 1, 1, 6, 6]]).half()
    native = ext_loader.load_ext('_ext', []).roi_align_forward
    for ratio, wanted in ((1, 20000.), (2, math.inf)):
        align = RoIAlign((2, 2), 1., ratio)
        assert emulated(align, features, rois).unique().tolist() == [wanted]
        out, empty = torch.zeros(1, 1, 2, 2).half(), torch.zeros(0).half()
        native(features, rois, out, empty, empty, aligned_height=2,
               aligned_width=2, spatial_scale=1., sampling_ratio=ratio,
               pool_mode=1, aligned=True)
        assert out.unique().tolist() == [wanted]


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


def attend(locations, value=None, weights=None, size=4):
    """One query, one head, one level, one point a location."""
    points = len(locations)
    value = torch.ones(1, size * size, 1, 2) if value is None else value
    weights = torch.ones(points) if weights is None else weights
    with cuda_autocast():
        return host.multi_scale_deformable_attn_pytorch(
            value.half(), torch.tensor([[size, size]]),
            locations.view(1, 1, 1, 1, points, 2),
            weights.view(1, 1, 1, 1, points))


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf, 1e5])
def test_a_point_that_is_not_finite_is_passed_over(bad):
    """As the kernel's comparisons do; its gradient is 0."""
    locations = torch.tensor([[.5, .5], [bad, .5]], requires_grad=True)
    out = attend(locations)
    assert out.flatten().tolist() == [1, 1]
    out.sum().backward()
    assert locations.grad[1].tolist() == [0, 0]
    assert torch.isfinite(locations.grad).all()


def test_deformable_attention_against_grid_sample():
    """In between and across the edges, forward and backward."""
    torch.manual_seed(0)
    shapes = torch.tensor([[5, 7], [3, 4]])
    value = torch.randn(2, 47, 3, 4).half().float().requires_grad_()
    locations = (torch.rand(2, 6, 3, 2, 2, 2) * 1.4 - .2).half().float()
    locations.requires_grad_()
    weights = torch.rand(2, 6, 3, 2, 2).half().float().requires_grad_()
    inputs = value, locations, weights
    wanted = host.multi_scale_deformable_attn_pytorch(
        value, shapes, locations, weights)
    grad = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, inputs, grad)
    with cuda_autocast():
        out = host.multi_scale_deformable_attn_pytorch(
            value.half(), shapes, locations, weights)
    assert out.dtype == HALF
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)
    for got, want in zip(torch.autograd.grad(out, inputs, grad.half()),
                         expected):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=5e-2)


def test_a_location_has_the_steps_of_half():
    """On a map of 400 a point near its end moves by a quarter pixel."""
    ramp = torch.arange(400.).repeat(400, 1).view(1, -1, 1, 1)
    location = torch.tensor([[.8026, .5]])
    out = attend(location, ramp, size=400).item()
    point = (location.half()[0, 0] * torch.tensor(400.).half()).item() - .5
    assert out == pytest.approx(point, abs=.13)
    assert abs(out - (.8026 * 400 - .5)) > .02


def test_memory_is_bounded_by_samples(monkeypatch):
    monkeypatch.setattr(half_sampling, '_SAMPLES_AT_ONCE', 100)
    rois = torch.tensor([[0., 0, 0, 9, 9]] * 5).half()
    places = (3, 3), 1., 0, True
    # Three by three bins of three by three samples: 81.
    runs = list(half_sampling._parts(rois, *places))
    assert [(run.start, run.stop) for run in runs] == [
        (index, index + 1) for index in range(5)]
    monkeypatch.setattr(half_sampling, '_SAMPLES_AT_ONCE', 170)
    runs = list(half_sampling._parts(rois, *places))
    assert [(run.start, run.stop) for run in runs] == [
        (0, 2), (2, 4), (4, 5)]
