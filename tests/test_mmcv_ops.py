import pytest
import torch
from mmcv.ops import RoIAlign, batched_nms, nms

from mmdet_nanfix import mmcv_ops


def test_roi_align_takes_half_and_gives_half():
    torch.manual_seed(0)
    features = torch.randn(2, 3, 8, 8).half()
    rois = torch.tensor([[0., 1, 1, 6, 6], [1., 0, 0, 3, 5]]).half()
    align = RoIAlign((4, 4), sampling_ratio=2)
    half = features.clone().requires_grad_()
    wide = features.float().requires_grad_()
    out, reference = align(half, rois), align(wide, rois.float())
    assert out.dtype == torch.float16
    assert torch.equal(out, reference.half())
    out.sum().backward()
    reference.sum().backward()
    assert torch.equal(half.grad, wide.grad.half())


def test_max_pooling_writes_its_argmax_back():
    features = torch.randn(1, 2, 8, 8).half().requires_grad_()
    wide = features.detach().float().requires_grad_()
    rois = torch.tensor([[0., 1, 1, 6, 6]])
    align = RoIAlign((2, 2), sampling_ratio=2, pool_mode='max')
    align(features, rois.half()).sum().backward()
    align(wide, rois).sum().backward()
    assert torch.equal(features.grad, wide.grad.half())


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


def test_fp32_calls_and_repeated_registration_change_nothing():
    mmcv_ops.accept_half()
    from mmcv.utils import ext_loader
    module = ext_loader.load_ext('_ext', ['roi_align_forward'])
    op = module.roi_align_forward
    mmcv_ops.accept_half()
    assert module.roi_align_forward is op
    align = RoIAlign((2, 2))
    assert align(torch.rand(1, 1, 4, 4),
                 torch.tensor([[0., 0, 0, 3, 3]])).dtype == torch.float32
