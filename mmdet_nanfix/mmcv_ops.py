"""mmcv's compiled operations on a CPU, as their CUDA kernels compute them.

Most of mmcv's CPU kernels are CUDA's own code with another loop and take
half as they do: deformable and modulated convolution, rotated RoIAlign, NMS
(half scores, which it only sorts; half boxes are refused by both). Those
that differ are mended here:

* RoIAlign's half kernel takes 18 times as long on a CPU as its fp32 kernel
  (the half type has no vector arithmetic there). It is computed in fp32 at
  the sampling points, and with the weights, that the half kernel has. Not
  rounded is the sum of the samples of a bin, and in the backward the sum at
  a pixel, until they are complete. Max pooling is left to mmcv.
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
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
from mmcv.ops import multi_scale_deform_attn
from mmcv.utils import ext_loader
from torch import Tensor
from torch.nn import functional

from .emulation import is_emulating

__all__ = ['emulate_losses', 'emulate_ops']

Op = Callable[..., Any]

# Bounds the memory of the sampling points.
_ROIS_AT_ONCE = 128


def _sampling(rois: Tensor, shape: Sequence[int], size: Tuple[int, int],
              spatial_scale: float, sampling_ratio: int, aligned: bool
              ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where RoIAlign's half kernel samples, and with which weights.

    RoIs, bins, sampling points and weights are computed in half: a
    coordinate above 256 has steps of 0.25 pixels of the feature map.

    Args:
        rois: ``(n, 5)``, half: batch index, x1, y1, x2, y2.
        shape: Of the features, ``(batch, channels, height, width)``.
        size: Bins ``(height, width)``.
        spatial_scale: Feature pixels a pixel of the image.
        sampling_ratio: Samples a side of a bin; 0 adapts to the RoI.
        aligned: Whether RoIs are shifted by half a pixel.

    Returns:
        For the four neighbours of each sample that is inside, row numbers
        in the features as ``(batch * height * width, channels)``, weights,
        and the bin of the ``n * height * width`` ones, each ``(samples * 4,
        )``, bin after bin; for each RoI ``(n, 1, 1, 1)``, half, its samples
        a bin, those outside included.
    """
    half = functools.partial(torch.tensor, dtype=torch.float16)
    offset = 0.5 if aligned else 0.
    scale = half(spatial_scale)
    # Of each RoI, in the order y, x.
    start = rois[:, [2, 1]] * scale - offset
    extent = rois[:, [4, 3]] * scale - offset - start
    if not aligned:
        extent = extent.clamp(min=1.)
    step = extent / half(size)
    samples = torch.full_like(step, sampling_ratio) if (
        sampling_ratio > 0) else step.ceil()
    # A RoI that is empty or not finite is not sampled at all.
    grid = samples.float().nan_to_num(0., 0., 0.).long().clamp(min=0)
    a_bin = grid.prod(1)
    roi = torch.arange(len(rois)).repeat_interleave(
        a_bin * (size[0] * size[1]))
    counts = a_bin.repeat_interleave(size[0] * size[1])
    of_bin = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(roi)) - (counts.cumsum(0) - counts)[of_bin]
    columns = grid[roi, 1]
    place = (torch.div(of_bin, size[1], rounding_mode='floor') % size[0],
             of_bin % size[1])
    sample = (torch.div(within, columns, rounding_mode='floor'),
              within % columns)
    low, high, near, far, inside = [], [], [], [], []
    for axis in (0, 1):
        at = step[roi, axis]
        point = start[roi, axis] + place[axis].half() * at + (
            (sample[axis] + .5).half() * at / grid[roi, axis].half())
        inside.append((point >= -1) & (point <= shape[2 + axis]))
        last = shape[2 + axis] - 1
        point = point.clamp(0, last)
        floor = point.long().clamp(max=last)
        low.append(floor)
        high.append((floor + 1).clamp(max=last))
        far.append(point - floor.half())
        near.append(1. - far[axis])
    image = rois[:, 0].long()[roi] * (shape[2] * shape[3])
    rows = torch.stack([image + y * shape[3] + x for y in (low[0], high[0])
                        for x in (low[1], high[1])], 1)
    weights = torch.stack([y * x for y in (near[0], far[0])
                           for x in (near[1], far[1])], 1).float()
    seen = inside[0] & inside[1]
    return (rows[seen].flatten(), weights[seen].flatten(),
            of_bin[seen].repeat_interleave(4),
            a_bin.clamp(min=1).half().view(-1, 1, 1, 1))


def _weighted_rows(table: Tensor, rows: Tensor, weights: Tensor,
                   into: Tensor, size: int) -> Tensor:
    """``out[into] += weights * table[rows]`` in fp32; ``into`` ascends."""
    counts = torch.bincount(into, minlength=size)
    return functional.embedding_bag(
        rows, table, counts.cumsum(0) - counts, mode='sum',
        per_sample_weights=weights)


def _is_half(*tensors: Any) -> bool:
    return any(isinstance(tensor, Tensor) and tensor.dtype == torch.float16
               and tensor.device.type == 'cpu' for tensor in tensors)


def _places(settings: Dict[str, Any]) -> Tuple[Any, ...]:
    """The kernel's settings in the order of :func:`_sampling`."""
    return ((settings['aligned_height'], settings['aligned_width']),
            settings['spatial_scale'], settings['sampling_ratio'],
            settings['aligned'])


def _roi_align_forward(op: Op) -> Op:

    @functools.wraps(op)
    def call(input: Tensor, rois: Tensor, output: Tensor,  # noqa: A002
             argmax_y: Tensor, argmax_x: Tensor, **settings: Any) -> None:
        if not (_is_half(input) and _is_half(rois) and len(rois)
                and settings['pool_mode'] == 1):
            op(input, rois, output, argmax_y, argmax_x, **settings)
            return
        table = input.permute(0, 2, 3, 1).reshape(-1, input.size(1)).float()
        at = 0
        for part in rois.split(_ROIS_AT_ONCE):
            rows, weights, of_bin, count = _sampling(
                part, input.shape, *_places(settings))
            out = output[at:at + len(part)]
            total = _weighted_rows(table, rows, weights, of_bin,
                                   out.numel() // table.size(1))
            # The half kernel sums the samples of a bin before it divides:
            # four samples of 20,000 are inf.
            out.copy_(total.view(len(part), *out.shape[2:], -1)
                      .permute(0, 3, 1, 2).half() / count)
            at += len(part)

    return call


def _roi_align_backward(op: Op) -> Op:

    @functools.wraps(op)
    def call(grad_output: Tensor, rois: Tensor, argmax_y: Tensor,
             argmax_x: Tensor, grad_input: Tensor, **settings: Any) -> None:
        if not (_is_half(grad_output) and len(rois)
                and settings['pool_mode'] == 1):
            op(grad_output, rois, argmax_y, argmax_x, grad_input, **settings)
            return
        batch, channels, height, width = grad_input.shape
        table = torch.zeros(batch * height * width, channels)
        at = 0
        for part in rois.split(_ROIS_AT_ONCE):
            rows, weights, of_bin, count = _sampling(
                part, grad_input.shape, *_places(settings))
            grad = grad_output[at:at + len(part)].float() / count.float()
            rows, order = rows.sort()
            table += _weighted_rows(
                grad.permute(0, 2, 3, 1).reshape(-1, channels),
                of_bin[order], weights[order], rows, len(table))
            at += len(part)
        grad_input.copy_(table.view(batch, height, width, channels)
                         .permute(0, 3, 1, 2))

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
