"""mmcv's compiled operations on a CPU, as their CUDA kernels compute them.

Most of mmcv's CPU kernels are CUDA's own code with another loop and take
half as they do: deformable and modulated convolution, rotated RoIAlign, NMS
(half scores, which it only sorts; half boxes are refused by both). Those
that differ are mended here:

* RoIAlign's half kernel takes 18 times as long on a CPU as its fp32 kernel
  (the half type has no vector arithmetic there). It is computed in fp32 from
  what the half kernel makes of the RoIs. What remains different is the
  rounding of the sampling points inside a bin: about half a unit in the last
  place of the result on average.
* sigmoid focal loss has no CPU kernel, and mmdet's ``FocalLoss`` takes a
  Python formula instead, which lacks the CUDA kernel's faults.
* multi-scale deformable attention takes a Python formula on a CPU, which
  does not cast its locations and weights to half as the CUDA path does.
* NMS of rotated boxes and of quadrilaterals and rotated feature alignment
  take half on a GPU only: computed in fp32 on the rounded inputs.
* voxelization takes half on a CPU only: refused.

Sources: ``roi_align_cuda_kernel.cuh``, ``sigmoid_focal_loss_cuda_kernel.cuh``
and ``multi_scale_deform_attn.py`` of mmcv 2.1.0.
"""
import functools
import sys
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from mmcv.ops import multi_scale_deform_attn
from mmcv.utils import ext_loader
from torch import Tensor

from .emulation import is_emulating

__all__ = ['emulate_losses', 'emulate_ops']

Op = Callable[..., Any]


def _half_rois(rois: Tensor, size: Tuple[int, int], spatial_scale: float,
               sampling_ratio: int, aligned: bool) -> Tuple[Tensor, Tensor]:
    """RoIs as the half kernel sees them, and samples a bin.

    Start and size are computed in half, where a coordinate of 300 has steps
    of 0.25. What comes back gives the fp32 kernel the same start and size
    at a spatial scale of 1.

    Args:
        rois: ``(n, 5)``, half: batch index, x1, y1, x2, y2.
        size: Bins ``(height, width)``.
        spatial_scale: Feature pixels a pixel of the image.
        sampling_ratio: Samples a side of a bin; 0 adapts to the RoI.
        aligned: Whether RoIs are shifted by half a pixel.

    Returns:
        RoIs ``(n, 5)`` in fp32 and ``(n, 1, 1, 1)`` samples a bin.
    """
    offset = 0.5 if aligned else 0.
    scale = torch.tensor(spatial_scale, dtype=torch.float16)
    start = rois[:, 1:3] * scale - offset
    extent = rois[:, 3:5] * scale - offset - start
    if not aligned:
        extent = extent.clamp(min=1.)
    corner = start.float() + offset
    wide = torch.cat([rois[:, :1].float(), corner, corner + extent.float()],
                     1)
    if sampling_ratio > 0:
        grid = torch.full_like(extent, sampling_ratio)
    else:
        bins = torch.tensor([size[1], size[0]], dtype=torch.float16)
        grid = (extent / bins).ceil()
    # The kernel counts at least one sample where a RoI is empty.
    count = grid.float().prod(1).clamp(min=1.)
    return wide, count.view(-1, 1, 1, 1)


def _is_half(*tensors: Any) -> bool:
    return any(isinstance(tensor, Tensor) and tensor.dtype == torch.float16
               and tensor.device.type == 'cpu' for tensor in tensors)


def _at_half_rois(rois: Tensor,
                  settings: Dict[str, Any]) -> Tuple[Tensor, Tensor, Any]:
    """RoIs and counts of :func:`_half_rois`, and settings to go with them."""
    wide, count = _half_rois(
        rois, (settings['aligned_height'], settings['aligned_width']),
        settings['spatial_scale'], settings['sampling_ratio'],
        settings['aligned'])
    return wide, count, {**settings, 'spatial_scale': 1.}


def _roi_align_forward(op: Op) -> Op:

    @functools.wraps(op)
    def call(input: Tensor, rois: Tensor, output: Tensor,  # noqa: A002
             argmax_y: Tensor, argmax_x: Tensor, **settings: Any) -> None:
        if not _is_half(input):
            op(input, rois, output, argmax_y, argmax_x, **settings)
            return
        wide, count, settings = _at_half_rois(rois, settings)
        out, at_y, at_x = (t.float() for t in (output, argmax_y, argmax_x))
        op(input.float(), wide, out, at_y, at_x, **settings)
        if settings['pool_mode'] == 1:
            # The half kernel sums the samples of a bin before it divides:
            # four samples of 20,000 are inf.
            out = (out * count).half() / count.half()
        output.copy_(out)
        argmax_y.copy_(at_y)
        argmax_x.copy_(at_x)

    return call


def _roi_align_backward(op: Op) -> Op:

    @functools.wraps(op)
    def call(grad_output: Tensor, rois: Tensor, argmax_y: Tensor,
             argmax_x: Tensor, grad_input: Tensor, **settings: Any) -> None:
        if not _is_half(grad_output):
            op(grad_output, rois, argmax_y, argmax_x, grad_input, **settings)
            return
        wide, _, settings = _at_half_rois(rois, settings)
        grad = grad_input.float()
        op(grad_output.float(), wide, argmax_y.float(), argmax_x.float(),
           grad, **settings)
        grad_input.copy_(grad)

    return call


def _widened(op: Op, writes: Tuple[int, ...] = ()) -> Op:
    """Compute in fp32; ``writes`` are the places that the call fills."""

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_half(*args):
            return op(*args, **kwargs)
        wide = [value.float() if _is_half(value) else value
                for value in args]
        out = op(*wide, **kwargs)
        for place in writes:
            args[place].copy_(wide[place])
        return out

    return call


def _refusing(op: Op) -> Op:

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_half(*args) and is_emulating():
            raise RuntimeError(f"{op.__name__} is not implemented for 'Half' "
                               'under CUDA, and so under its emulation')
        return op(*args, **kwargs)

    return call


def _focal_terms(input: Tensor, target: Tensor,  # noqa: A002
                 gamma: float, alpha: float) -> Tuple[Tensor, ...]:
    """What both kernels start with, each value of the input's dtype.

    In half, gamma and alpha are rounded too, and ``FLT_MIN`` is 0, so that
    log(0) is reached from a logit of 8.4 on.
    """
    dtype = input.dtype
    classes = torch.arange(input.size(1), device=input.device)
    positive = (target[:, None] == classes).to(dtype)
    p = (1. / (1. + torch.exp(-input.float()))).to(dtype)
    q = (1. - p.float()).to(dtype)
    smallest = torch.tensor(torch.finfo(torch.float32).tiny).to(dtype)
    log_p = torch.log(torch.maximum(p, smallest).float())
    log_q = torch.log(torch.maximum(q, smallest).float())
    g, a = (torch.tensor(value).to(dtype) for value in (gamma, alpha))
    return positive, p, q, log_p, log_q, g, a


def _focal_sum(positive: Tensor, alpha: Tensor, term_p: Tensor,
               term_n: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """``0 - [c = t] alpha term_p - [c != t] (1 - alpha) term_n``.

    Both products are formed whatever the label, so that a term of inf is
    NaN where its flag is 0.
    """
    dtype = positive.dtype
    out = -positive * alpha * term_p.to(dtype)
    out = out + -(1 - positive) * (1 - alpha) * term_n.to(dtype)
    return out * weight[target][:, None] if weight.numel() else out


def _focal_forward(op: Op) -> Op:

    @functools.wraps(op)
    def call(input: Tensor, target: Tensor, weight: Tensor,  # noqa: A002
             output: Tensor, *, gamma: float, alpha: float) -> None:
        if input.device.type != 'cpu':
            op(input, target, weight, output, gamma=gamma, alpha=alpha)
            return
        positive, p, q, log_p, log_q, g, a = _focal_terms(
            input, target, gamma, alpha)
        term_p = q.float().pow(g.float()) * log_p
        term_n = p.float().pow(g.float()) * log_q
        output.copy_(_focal_sum(positive, a, term_p, term_n, weight, target))

    return call


def _focal_backward(op: Op) -> Op:

    @functools.wraps(op)
    def call(input: Tensor, target: Tensor, weight: Tensor,  # noqa: A002
             grad_input: Tensor, *, gamma: float, alpha: float) -> None:
        if input.device.type != 'cpu':
            op(input, target, weight, grad_input, gamma=gamma, alpha=alpha)
            return
        positive, p, q, log_p, log_q, g, a = _focal_terms(
            input, target, gamma, alpha)
        term_p = q.float().pow(g.float()) * (
            q.float() - (g * p).float() * log_p)
        term_n = p.float().pow(g.float()) * (
            (g * q).float() * log_q - p.float())
        grad_input.copy_(
            _focal_sum(positive, a, term_p, term_n, weight, target))

    return call


def _attention(original: Op) -> Op:

    @functools.wraps(original)
    def call(value: Tensor, value_spatial_shapes: Tensor,
             sampling_locations: Tensor,
             attention_weights: Tensor) -> Tensor:
        if not (is_emulating() and _is_half(value)):
            return original(value, value_spatial_shapes, sampling_locations,
                            attention_weights)
        # type_as, as on the CUDA path; the kernel then sums in fp32.
        locations = sampling_locations.type_as(value)
        weights = attention_weights.type_as(value)
        with torch.autocast('cpu', enabled=False):
            out = original(value.float(), value_spatial_shapes,
                           locations.float(), weights.float())
        return out.type_as(value)

    return call


def _focal_loss(original: Op) -> Op:
    module = sys.modules[original.__module__]

    @functools.wraps(original)
    def forward(self: Any, pred: Tensor, target: Tensor,
                weight: Optional[Tensor] = None,
                avg_factor: Any = None,
                reduction_override: Optional[str] = None) -> Tensor:
        labels = pred.dim() != target.dim()
        if not (is_emulating() and self.use_sigmoid and labels
                and not self.activated):
            return original(self, pred, target, weight, avg_factor,
                            reduction_override)
        return self.loss_weight * module.sigmoid_focal_loss(
            pred, target, weight, gamma=self.gamma, alpha=self.alpha,
            reduction=reduction_override or self.reduction,
            avg_factor=avg_factor)

    return forward


def _replace(place: Any, name: str, make: Callable[[Op], Op]) -> None:
    op = getattr(place, name)
    if not getattr(op, 'of_mmdet_nanfix', False):
        op = make(op)
        op.of_mmdet_nanfix = True  # type: ignore[attr-defined]
        setattr(place, name, op)


def emulate_ops() -> None:
    """Make the operations above compute on a CPU as they do under CUDA.

    fp32 calls, and calls outside of an emulated region, go through
    unchanged. Doing it twice does nothing more.

    Raises:
        ImportError: mmcv was installed without its operations.
    """
    third = functools.partial(_widened, writes=(2, ))
    compiled: Dict[str, Callable[[Op], Op]] = {
        'roi_align_forward': _roi_align_forward,
        'roi_align_backward': _roi_align_backward,
        'sigmoid_focal_loss_forward': _focal_forward,
        'sigmoid_focal_loss_backward': _focal_backward,
        'nms_rotated': _widened,
        'nms_quadri': _widened,
        'rotated_feature_align_forward': third,
        'rotated_feature_align_backward': third,
        'hard_voxelize_forward': _refusing,
        'dynamic_voxelize_forward': _refusing,
    }
    module = ext_loader.load_ext('_ext', list(compiled))
    for name, make in compiled.items():
        _replace(module, name, make)
    _replace(multi_scale_deform_attn, 'multi_scale_deformable_attn_pytorch',
             _attention)


def emulate_losses() -> None:
    """Make mmdet's ``FocalLoss`` take its CUDA path in emulated regions.

    Raises:
        ImportError: mmdet is not installed.
    """
    from mmdet.models.losses import FocalLoss

    _replace(FocalLoss, 'forward', _focal_loss)
