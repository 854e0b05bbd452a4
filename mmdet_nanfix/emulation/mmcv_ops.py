"""Compute mmcv's compiled operations on a CPU as their CUDA kernels do.

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

They are patched while the emulation is registered, and count in emulated
regions alone: any other call is mmcv's own. The backward of a graph is whose
its forward was, so the graph keeps the registration.

Source: ``multi_scale_deform_attn.py`` of mmcv 2.1.0.
"""
from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from ..torch_support import AUTOCAST_BY_DEVICE
from .autocast_switch import in_emulation
from .focal_loss import focal_loss, focal_loss_backward
from .sampling import deformable_attention, roi_align, roi_align_backward

__all__ = ['patches']

Op = Callable[..., Any]
Make = Callable[[Any], Any]


def _is_half(*tensors: Any) -> bool:
    return any(isinstance(tensor, Tensor) and tensor.dtype == torch.float16
               and tensor.device.type == 'cpu' for tensor in tensors)


def _is_single(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == 'cpu'


def _places(settings: dict[str, Any]) -> tuple[Any, ...]:
    """Return the settings in the order of :func:`.roi_align`."""
    return ((settings['aligned_height'], settings['aligned_width']),
            settings['spatial_scale'], settings['sampling_ratio'],
            settings['aligned'])


# Shape of the empty argmax of average pooling where we have pooled: its
# backward may run outside of the region.
_OURS = (0, 1)


def _roi_align_forward(op: Op) -> Op:

    @functools.wraps(op)
    def call(input: Tensor, rois: Tensor, output: Tensor,  # noqa: A002
             argmax_y: Tensor, argmax_x: Tensor, **settings: Any) -> None:
        ours = len(rois) and settings['pool_mode'] == 1 and (
            _is_half(input) and _is_half(rois)
            or _is_single(input) and _is_single(rois))
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
        if _is_half(*args):
            raise RuntimeError(f"{op.__name__} is not implemented for 'Half' "
                               'under CUDA, and so under its emulation')
        return op(*args, **kwargs)

    return call


def _refuse_bfloat16(name: str, *tensors: Tensor) -> None:
    """Raise for bfloat16, which mmcv's CUDA kernels do not have."""
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        raise RuntimeError(f"{name} is not implemented for 'BFloat16' under "
                           'CUDA, and so under its emulation')


def _focal(compute: Callable[..., Tensor], op: Op) -> Op:

    @functools.wraps(op)
    def call(input: Tensor, target: Tensor, weight: Tensor,  # noqa: A002
             out: Tensor, *, gamma: float, alpha: float) -> None:
        if input.device.type != 'cpu':
            op(input, target, weight, out, gamma=gamma, alpha=alpha)
            return
        _refuse_bfloat16(compute.__name__, input)
        out.copy_(compute(input, target, weight, gamma, alpha))

    return call


def _attention(original: Op) -> Op:

    @functools.wraps(original)
    def call(value: Tensor, value_spatial_shapes: Tensor,
             sampling_locations: Tensor,
             attention_weights: Tensor) -> Tensor:
        _refuse_bfloat16('ms_deform_attn_forward', value)
        if not _is_half(value):
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
        if self.activated or not (self.use_sigmoid and labels):
            return original(self, pred, target, weight, avg_factor,
                            reduction_override)
        return self.loss_weight * module.sigmoid_focal_loss(
            pred, target, weight, gamma=self.gamma, alpha=self.alpha,
            reduction=reduction_override or self.reduction,
            avg_factor=avg_factor)

    return forward


def _in_emulation(make: Make) -> Make:
    """Let a replacement count in emulated regions alone."""

    def made(original: Op) -> Op:
        ours = make(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (ours if in_emulation() else original)(*args, **kwargs)

        return call

    return made


def _holding(held: Callable[[], Any]) -> Make:
    """Let a node of the graph keep the registration for its backward."""

    def make(original: Any) -> Any:
        function: Op = getattr(original, '__func__', original)

        @functools.wraps(function)
        def forward(ctx: Any, *args: Any) -> Any:
            if in_emulation():
                ctx.nanfix_registration = held()
            return function(ctx, *args)

        return staticmethod(forward)

    return make


_THIRD = functools.partial(_widened, writes=(2, ))
_FORWARDS: dict[str, Make] = {
    'roi_align_forward': _roi_align_forward,
    'sigmoid_focal_loss_forward': functools.partial(_focal, focal_loss),
    'nms_rotated': _widened,
    'nms_quadri': _widened,
    'box_iou_rotated': _THIRD,
    'box_iou_quadri': _THIRD,
    'rotated_feature_align_forward': _THIRD,
    'hard_voxelize_forward': _refusing,
    'dynamic_voxelize_forward': _refusing,
}
_BACKWARDS: dict[str, Make] = {
    'roi_align_backward': _roi_align_backward,
    'sigmoid_focal_loss_backward': functools.partial(
        _focal, focal_loss_backward),
    'rotated_feature_align_backward': _THIRD,
}
# Whose backward is one of these, by module.
_NODES = {
    'focal_loss': 'SigmoidFocalLossFunction',
    'roi_align': 'RoIAlignFunction',
    'rotated_feature_align': 'RotatedFeatureAlignFunction',
}
if not AUTOCAST_BY_DEVICE:
    # They multiply matrices of their inputs' dtype.
    _FORWARDS.update({
        'deform_conv_forward': functools.partial(_widened, writes=(3, )),
        'modulated_deform_conv_forward': functools.partial(
            _widened, writes=(6, )),
    })
    _BACKWARDS.update({
        'deform_conv_backward_input': functools.partial(
            _widened, writes=(3, 4)),
        'deform_conv_backward_parameters': functools.partial(
            _widened, writes=(3, )),
        'modulated_deform_conv_backward': functools.partial(
            _widened, writes=(7, 8, 9, 10, 11)),
    })
    _NODES.update(deform_conv='DeformConv2dFunction',
                  modulated_deform_conv='ModulatedDeformConv2dFunction')


def _found(held: Callable[[], Any]) -> Iterator[tuple[Any, str, Make]]:
    try:
        from mmcv import _ext
        from mmcv.ops import multi_scale_deform_attn
    except ImportError:
        # mmcv-lite has no compiled operations.
        return
    for name, make in {**_BACKWARDS, **{
            name: _in_emulation(make)
            for name, make in _FORWARDS.items()}}.items():
        yield _ext, name, make
    yield (multi_scale_deform_attn, 'multi_scale_deformable_attn_pytorch',
           _in_emulation(_attention))
    for module, name in _NODES.items():
        yield (getattr(sys.modules.get(f'mmcv.ops.{module}'), name, None),
               'forward', _holding(held))
    try:
        from mmdet.models.losses import FocalLoss
    except ImportError:
        return
    yield FocalLoss, 'forward', _in_emulation(_focal_loss)


@functools.lru_cache(maxsize=1)
def patches(held: Callable[[], Any]) -> tuple[tuple[Any, str, Make], ...]:
    """Return what is replaced in mmcv and mmdet, where they are installed.

    They are imported for it, in the first call.

    Args:
        held: Returns what keeps the registration while it is referred to.

    Returns:
        Where, which name, and how the replacement is made of the original;
        of one original always the same.
    """
    return tuple((place, name, functools.lru_cache(maxsize=2)(make))
                 for place, name, make in _found(held)
                 # Older versions lack some.
                 if hasattr(place, name))
