from __future__ import annotations

import subprocess
import sys
import threading

import mmcv
import pytest
import torch
from helpers.torch_features import needs_half
from mmcv.ops import (
    DeformConv2d,
    ModulatedDeformConv2d,
    RoIAlign,
    batched_nms,
    box_iou_rotated,
    multi_scale_deform_attn,
    nms,
    nms_rotated,
    rotated_feature_align,
    sigmoid_focal_loss,
)
from mmcv.utils import ext_loader
from mmdet.models.losses import FocalLoss
from torch.utils.checkpoint import checkpoint

from mmdet_nanfix.emulation import autocast, cuda_autocast, mmcv_ops
from mmdet_nanfix.torch_support.patching import Patches, replaced

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
    with cuda_autocast():
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


def of_hosts():
    """What is replaced in mmcv and mmdet by the emulation right now."""
    return [(what.place, what.name) for what in replaced()
            if what.owner == 'emulation' and getattr(
                what.place, '__module__', what.place.__name__).startswith(
                    ('mmcv', 'mmdet'))]


FEATURES = torch.rand(1, 1, 4, 4)
ROIS = torch.tensor([[0., 0.3, 0, 3, 3]])


def some_calls():
    """fp32 calls of what is replaced, with gradients."""
    x = FEATURES.clone().requires_grad_()
    out = RoIAlign((2, 2))(x, ROIS)
    out.sum().backward()
    logits = torch.full((1, 2), 20.).requires_grad_()
    loss = FocalLoss()(logits, torch.tensor([0]))
    loss.backward()
    attended = multi_scale_deform_attn.multi_scale_deformable_attn_pytorch(
        FEATURES.view(1, 16, 1, 1), torch.tensor([[4, 4]]),
        ROIS[0, 1:3].view(1, 1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 1))
    boxes = torch.tensor([[10., 10, 8, 4, .5]])
    return [out.detach(), x.grad, loss.detach(), logits.grad, attended,
            box_iou_rotated(boxes, boxes)]


def test_nothing_is_replaced_outside_of_regions():
    assert of_hosts() == []
    module = ext_loader.load_ext('_ext', [])
    op, forward = module.roi_align_forward, vars(FocalLoss)['forward']
    for _ in range(2):
        with cuda_autocast(), cuda_autocast():
            names = {name for _, name in of_hosts()}
            assert {'roi_align_forward', 'sigmoid_focal_loss_backward',
                    'forward'} < names and len(names) > 12
            assert module.roi_align_forward is not op
        assert of_hosts() == []
    assert module.roi_align_forward is op
    assert vars(FocalLoss)['forward'] is forward


def test_a_wrapper_of_the_loss_keeps_standing_over_the_emulation():
    seen = []
    with Patches('test') as patches:
        patches.wrap(FocalLoss, 'forward', lambda original: (
            lambda self, *args: seen.append(True) or original(self, *args)))
        pred, target = torch.full((1, 2), 20.).half(), torch.tensor([0])
        with cuda_autocast():
            out = FocalLoss(reduction='none')(pred, target)[0].tolist()
        assert list(map(str, out)) == ['nan', 'inf'] and seen == [True]
        out = FocalLoss(reduction='none')(pred.float(), target)
        assert out.isfinite().all() and len(seen) == 2
    assert of_hosts() == []


def rotated(x):
    boxes = torch.tensor([2., 2, 2, 2, .3]).half().expand(1, 1, 4, 4, 5)
    return rotated_feature_align(x.half(), boxes.reshape(1, 4, 4, 5))


CONV = DeformConv2d(1, 1, 3, padding=1)
OFFSETS = torch.rand(1, 18, 4, 4)
GRAPHS = {
    'half': lambda x: RoIAlign((2, 2))(x.half(), ROIS.half()),
    'fp32': lambda x: RoIAlign((2, 2))(x, ROIS),
    'max': lambda x: RoIAlign((2, 2), pool_mode='max')(x, ROIS),
    'focal': lambda x: FocalLoss(reduction='none')(
        x.view(8, 2).half(), torch.arange(8) % 3),
    'deformable': lambda x: CONV(x, OFFSETS.half()),
    'rotated': rotated,
}


@pytest.mark.parametrize('name', GRAPHS)
def test_a_backward_after_the_region_is_the_one_within(name):
    def run(outside, use_checkpoint=False):
        x = FEATURES.clone().requires_grad_()
        with cuda_autocast():
            out = checkpoint(GRAPHS[name], x, use_reentrant=False) if (
                use_checkpoint) else GRAPHS[name](x)
            loss = (out.float() * 1.7).sum()
            if not outside:
                loss.backward()
        if outside:
            loss.backward()
        return out.detach(), x.grad

    wanted = run(False)
    assert wanted[1].count_nonzero()
    for other in (run(True), run(True, True)):
        assert all(map(torch.equal, wanted, other))
    assert of_hosts() == [] and not autocast.is_emulating()


def test_a_graph_keeps_the_registration_until_it_is_freed():
    expected = some_calls()
    x = FEATURES.clone().requires_grad_()
    with cuda_autocast():
        out = RoIAlign((2, 2))(x, ROIS)
        flat = RoIAlign((2, 2))(FEATURES, ROIS)
    assert of_hosts() and autocast.is_emulating()
    # What is no part of it is mmcv's own.
    assert all(map(torch.equal, some_calls(), expected))
    with pytest.raises(RuntimeError, match='cpu'):
        sigmoid_focal_loss(x.view(8, 2), torch.arange(8) % 3)
    grads = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
             for _ in range(2)]
    assert torch.equal(*grads) and not torch.equal(
        grads[0], torch.zeros_like(x))
    del out
    assert of_hosts() == [] and not autocast.is_emulating()
    assert flat.grad_fn is None


@needs_half
def test_two_threads():
    """One ends while the other is in its region, and a third is in none."""
    expected = some_calls()
    seen, failed = {}, []
    first, second = threading.Event(), threading.Event()

    def half(name, mine, others):
        x = FEATURES.clone().requires_grad_()
        with cuda_autocast():
            out = RoIAlign((2, 2))(x, ROIS)
            mine.set()
            others.wait(20)
        out.sum().backward()
        seen[name] = x.grad

    def plain():
        first.wait(20)
        if not all(map(torch.equal, some_calls(), expected)):
            failed.append('fp32 calls changed')
        second.set()

    threads = [threading.Thread(target=half, args=('a', first, second)),
               threading.Thread(target=plain),
               threading.Thread(target=half, args=('b', first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and torch.equal(seen['a'], seen['b'])
    assert of_hosts() == [] and not autocast.is_emulating()


@pytest.mark.parametrize('hidden, kept', [
    ('mmcv._ext', 'nothing'), ('mmdet.models.losses', 'mmcv')])
def test_without_compiled_operations_or_mmdet(hidden, kept, monkeypatch):
    """mmcv-lite has none."""
    mmcv_ops.patches.cache_clear()
    monkeypatch.setitem(sys.modules, hidden, None)
    if hidden == 'mmcv._ext':
        monkeypatch.delattr(mmcv, '_ext')
    try:
        with cuda_autocast():
            names = {name for _, name in of_hosts()}
            assert ('roi_align_forward' in names) == (kept == 'mmcv')
            assert FocalLoss not in [place for place, _ in of_hosts()]
    finally:
        mmcv_ops.patches.cache_clear()


def test_the_import_of_the_emulation_loads_no_host():
    code = ('import sys, importlib.machinery as m, types\n'
            'import mmdet_nanfix.torch_support\n'
            'before = set(sys.modules)\n'
            'for name in [n for n in sys.modules if n.startswith(("mmcv", '
            '"mmdet."))]:\n    del sys.modules[name]\n'
            'import mmdet_nanfix.emulation\n'
            'print([n for n in sys.modules if n.startswith(("mmcv", '
            '"mmdet."))])\n')
    done = subprocess.run([sys.executable, '-c', code], text=True,
                          capture_output=True, timeout=120)
    assert done.stdout.split('\n')[-2] == '[]', done.stderr


def test_bfloat16_is_refused_where_mmcv_has_no_kernel():
    pred, target = torch.zeros(1, 2).bfloat16(), torch.tensor([0])
    with cuda_autocast(torch.bfloat16), pytest.raises(
            RuntimeError, match='BFloat16'):
        FocalLoss()(pred, target)


def test_rotated_iou_takes_half():
    boxes = torch.tensor([[10., 10, 8, 4, 0], [10., 10, 8, 4, .5]])
    with cuda_autocast():
        iou = box_iou_rotated(boxes.half(), boxes.half())
    assert iou.dtype == HALF
    torch.testing.assert_close(
        iou.float(), box_iou_rotated(boxes, boxes), rtol=1e-2, atol=1e-2)
