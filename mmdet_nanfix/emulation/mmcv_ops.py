"""mmcv's compiled operations on a CPU, as their CUDA kernels compute them.

Most of mmcv's CPU kernels are CUDA's own code with another loop and take
half as they do: deformable and modulated convolution, rotated RoIAlign, NMS
(half scores, which it only sorts; half boxes are refused by both). Those
that differ are mended here:

* deformable and modulated convolution, before torch 2.4 only, multiply
  matrices of half, which torch refuses there: computed in fp32 on the rounded
  inputs. What is sampled is not rounded in between.

* RoIAlign's half kernel takes 18 times as long on a CPU as its fp32 kernel
  (the half type has no vector arithmetic there), and that one longer than it
  has to. Average pooling is computed by :mod:`.sampling`
  in both; max pooling is left to mmcv.
* sigmoid focal loss has no CPU kernel, and mmdet's ``FocalLoss`` takes a
  Python formula instead, which lacks the CUDA kernel's faults.
* multi-scale deformable attention takes a Python formula on a CPU. The CUDA
  kernel casts locations and weights to half and passes over points that are
  not finite.
* NMS and IoU of rotated boxes and of quadrilaterals, and rotated feature
  alignment, take half on a GPU only: computed in fp32 on the rounded inputs.
  The half kernels overflow inside for boxes with a diagonal above 256, whose
  IoU is NaN there, so that nothing is suppressed; that is not shown here.
  (MMDetection has no such boxes.)
* voxelization takes half on a CPU only: refused. bfloat16 is refused where
  mmcv has no CUDA kernel for it.

Sources: ``sigmoid_focal_loss_cuda_kernel.cuh`` and
``multi_scale_deform_attn.py`` of mmcv 2.1.0.
"""
from __future__ import annotations

import functools
import sys
from typing import Any, Callable

import torch
from mmcv.ops import multi_scale_deform_attn
from mmcv.utils import ext_loader
from torch import Tensor

from ..torch_support import AUTOCAST_BY_DEVICE
from .autocast import is_emulating
from .sampling import deformable_attention, roi_align, roi_align_backward

__all__ = ['emulate_losses', 'emulate_ops']

Op = Callable[..., Any]


def _is_half(*tensors: Any) -> bool:
    return any(isinstance(tensor, Tensor) and tensor.dtype == torch.float16
               and tensor.device.type == 'cpu' for tensor in tensors)


def _is_single(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == 'cpu'


def _places(settings: dict[str, Any]) -> tuple[Any, ...]:
    """The kernel's settings in the order of :func:`.roi_align`."""
    return ((settings['aligned_height'], settings['aligned_width']),
            settings['spatial_scale'], settings['sampling_ratio'],
            settings['aligned'])


# Shape of the empty argmax of average pooling where we have pooled: its
# backward runs when nothing tells any more that a GPU was meant.
_OURS = (0, 1)


def _roi_align_forward(op: Op) -> Op:

    @functools.wraps(op)
    def call(input: Tensor, rois: Tensor, output: Tensor,  # noqa: A002
             argmax_y: Tensor, argmax_x: Tensor, **settings: Any) -> None:
        ours = len(rois) and settings['pool_mode'] == 1 and (
            _is_half(input) and _is_half(rois) or is_emulating()
            and _is_single(input) and _is_single(rois))
        if not ours:
            op(input, rois, output, argmax_y, argmax_x, **settings)
        else:
            roi_align(input, rois, output, *_places(settings))
            argmax_y.resize_(_OURS)

    return call


def _roi_align_backward(op: Op) -> Op:

    @functools.wraps(op)
    def call(grad_output: Tensor, rois: Tensor, argmax_y: Tensor,
             argmax_x: Tensor, grad_input: Tensor, **settings: Any) -> None:
        if argmax_y.shape != _OURS:
            op(grad_output, rois, argmax_y, argmax_x, grad_input, **settings)
        else:
            grad_input.copy_(roi_align_backward(
                grad_output, rois, grad_input.shape, *_places(settings)))

    return call


def _widened(op: Op, writes: tuple[int, ...] = ()) -> Op:
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


def _refuse_bfloat16(name: str, *tensors: Tensor) -> None:
    """What mmcv's CUDA kernels do, which have no such type."""
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        raise RuntimeError(f"{name} is not implemented for 'BFloat16' under "
                           'CUDA, and so under its emulation')


def _focal_terms(input: Tensor, target: Tensor,  # noqa: A002
                 gamma: float, alpha: float) -> tuple[Tensor, ...]:
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
        _refuse_bfloat16('sigmoid_focal_loss_forward', input)
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
        if is_emulating():
            _refuse_bfloat16('ms_deform_attn_forward', value)
        if not (is_emulating() and _is_half(value)):
            return original(value, value_spatial_shapes, sampling_locations,
                            attention_weights)
        # type_as, as on the CUDA path.
        locations = sampling_locations.type_as(value)
        attention = attention_weights.type_as(value)
        shapes = [(int(height), int(width))
                  for height, width in value_spatial_shapes.tolist()]
        with torch.autocast('cpu', enabled=False):
            return deformable_attention(value, shapes, locations, attention)

    return call


def _focal_loss(original: Op) -> Op:
    module = sys.modules[original.__module__]

    @functools.wraps(original)
    def forward(self: Any, pred: Tensor, target: Tensor,
                weight: Tensor | None = None,
                avg_factor: Any = None,
                reduction_override: str | None = None) -> Tensor:
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


# Operations that multiply matrices of their inputs' dtype, and the arguments
# that they fill.
_GEMM_IN_HALF = {
    'deform_conv_forward': (3, ),
    'deform_conv_backward_input': (3, 4),
    'deform_conv_backward_parameters': (3, ),
    'modulated_deform_conv_forward': (6, ),
    'modulated_deform_conv_backward': (7, 8, 9, 10, 11),
}


def emulate_ops() -> None:
    """Make the operations above compute on a CPU as they do under CUDA.

    Outside of emulated regions fp32 calls go through unchanged. Doing it
    twice does nothing more.

    Raises:
        ImportError: mmcv was installed without its operations.
    """
    third = functools.partial(_widened, writes=(2, ))
    compiled: dict[str, Callable[[Op], Op]] = {
        'roi_align_forward': _roi_align_forward,
        'roi_align_backward': _roi_align_backward,
        'sigmoid_focal_loss_forward': _focal_forward,
        'sigmoid_focal_loss_backward': _focal_backward,
        'nms_rotated': _widened,
        'nms_quadri': _widened,
        'box_iou_rotated': third,
        'box_iou_quadri': third,
        'rotated_feature_align_forward': third,
        'rotated_feature_align_backward': third,
        'hard_voxelize_forward': _refusing,
        'dynamic_voxelize_forward': _refusing,
    }
    if not AUTOCAST_BY_DEVICE:
        compiled.update({
            name: functools.partial(_widened, writes=writes)
            for name, writes in _GEMM_IN_HALF.items()})
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
