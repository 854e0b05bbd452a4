"""Sample feature maps bilinearly, as mmcv's CUDA kernels do.

Where a kernel samples, and with which weights, is computed in its dtype, step
by step like in the kernel; what it reads there is summed in fp32, by an
embedding bag over the rows of the feature map, and rounded once. The half
kernels round after each sample instead: a sum that overflows on the way and
comes back is not shown.

Sources: ``roi_align_cuda_kernel.cuh`` and ``ms_deform_attn_cuda_kernel.cuh``
of mmcv 2.1.0.
"""
from __future__ import annotations

from typing import Any, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ['deformable_attention', 'roi_align', 'roi_align_backward']

# Bounds the memory of the sampling points: about 300 bytes each.
_SAMPLES_AT_ONCE = 1 << 18


def _bins(rois: Tensor, size: tuple[int, int], spatial_scale: float,
          sampling_ratio: int, aligned: bool
          ) -> tuple[Tensor, Tensor, Tensor]:
    """Return start and bin size, and samples a side of a bin.

    Each ``(n, 2)``, in the order y, x.
    """
    offset = 0.5 if aligned else 0.
    scale = rois.new_tensor(spatial_scale)
    # Of each RoI, in the order y, x.
    start = rois[:, [2, 1]] * scale - offset
    extent = rois[:, [4, 3]] * scale - offset - start
    if not aligned:
        extent = extent.clamp(min=1.)
    step = extent / extent.new_tensor(size)
    samples = torch.full_like(step, sampling_ratio) if (
        sampling_ratio > 0) else step.ceil()
    # A RoI that is empty or not finite is not sampled at all.
    grid = samples.float().nan_to_num(0., 0., 0.).long().clamp(min=0)
    return start, step, grid


def _parts(rois: Tensor, *places: Any) -> Iterator[slice]:
    """Yield runs of RoIs with a bounded number of samples, or of one RoI."""
    size = places[0]
    samples = _bins(rois, *places)[2].prod(1) * (size[0] * size[1])
    begin = total = 0
    for index, count in enumerate(samples.tolist()):
        if index > begin and total + count > _SAMPLES_AT_ONCE:
            yield slice(begin, index)
            begin, total = index, 0
        total += count
    yield slice(begin, len(rois))


def _sampling(rois: Tensor, shape: Sequence[int], size: tuple[int, int],
              spatial_scale: float, sampling_ratio: int, aligned: bool
              ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return where RoIAlign's kernel samples, and with which weights.

    RoIs, bins, sampling points and weights are computed in the RoIs' dtype.
    In half a coordinate above 256 has steps of 0.25 pixels of the feature
    map.

    Args:
        rois: ``(n, 5)``: batch index, x1, y1, x2, y2.
        shape: Of the features, ``(batch, channels, height, width)``.
        size: Bins ``(height, width)``.
        spatial_scale: Feature pixels a pixel of the image.
        sampling_ratio: Samples a side of a bin; 0 adapts to the RoI.
        aligned: Whether RoIs are shifted by half a pixel.

    Returns:
        For the four neighbours of each sample that is inside, row numbers
        in the features as ``(batch * height * width, channels)``, weights,
        and the bin of the ``n * height * width`` ones, each ``(samples * 4,
        )``, bin after bin; for each RoI ``(n, 1, 1, 1)`` its samples a
        bin, those outside included.
    """
    start, step, grid = _bins(rois, size, spatial_scale, sampling_ratio,
                              aligned)
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
        point = start[roi, axis] + place[axis].to(at.dtype) * at + (
            (sample[axis] + .5).to(at.dtype) * at
            / grid[roi, axis].to(at.dtype))
        inside.append((point >= -1) & (point <= shape[2 + axis]))
        last = shape[2 + axis] - 1
        point = point.clamp(0, last)
        floor = point.long().clamp(max=last)
        low.append(floor)
        high.append((floor + 1).clamp(max=last))
        far.append(point - floor.to(point.dtype))
        near.append(1. - far[axis])
    image = rois[:, 0].long()[roi] * (shape[2] * shape[3])
    rows = torch.stack([image + y * shape[3] + x for y in (low[0], high[0])
                        for x in (low[1], high[1])], 1)
    weights = torch.stack([y * x for y in (near[0], far[0])
                           for x in (near[1], far[1])], 1).float()
    seen = inside[0] & inside[1]
    return (rows[seen].flatten(), weights[seen].flatten(),
            of_bin[seen].repeat_interleave(4),
            a_bin.clamp(min=1).to(rois.dtype).view(-1, 1, 1, 1))


def _weighted_rows(table: Tensor, rows: Tensor, weights: Tensor,
                   into: Tensor, size: int) -> Tensor:
    """Sum ``weights * table[rows]`` by ``into`` in fp32; it ascends."""
    counts = torch.bincount(into, minlength=size)
    return functional.embedding_bag(
        rows, table, counts.cumsum(0) - counts, mode='sum',
        per_sample_weights=weights)


def roi_align(features: Tensor, rois: Tensor, out: Tensor,
              *places: Any) -> None:
    """Compute RoIAlign with average pooling.

    Args:
        features: ``(batch, channels, height, width)``, half or fp32.
        rois: ``(n, 5)``, of that dtype: batch index, x1, y1, x2, y2.
        out: ``(n, channels, height, width)`` of the bins, of that dtype; it
            is written to.
        *places: Bins ``(height, width)``, spatial scale, sampling ratio (0
            adapts to the RoI), and whether RoIs are shifted by half a pixel.
    """
    channels, size = features.size(1), places[0]
    table = features.permute(0, 2, 3, 1).reshape(-1, channels).float()
    for run in _parts(rois, *places):
        rows, weights, of_bin, count = _sampling(
            rois[run], features.shape, *places)
        total = _weighted_rows(table, rows, weights, of_bin,
                               len(count) * size[0] * size[1])
        # The half kernel sums the samples of a bin before it divides: four
        # samples of 20,000 are inf.
        torch.div(total.view(len(count), *size, channels).to(rois.dtype)
                  .permute(0, 3, 1, 2), count, out=out[run])


def roi_align_backward(grad: Tensor, rois: Tensor, shape: Sequence[int],
                       *places: Any) -> Tensor:
    """Return the gradient of :func:`roi_align` for the features, fp32.

    Args:
        grad: ``(n, channels, height, width)`` of the bins, half or fp32.
        rois: As there.
        shape: Of the features.
        *places: As there.
    """
    batch, channels, height, width = shape
    table = torch.zeros(batch * height * width, channels)
    for run in _parts(rois, *places):
        rows, weights, of_bin, count = _sampling(rois[run], shape, *places)
        part = grad[run].float() / count.float()
        rows, order = rows.sort()
        table += _weighted_rows(
            part.permute(0, 2, 3, 1).reshape(-1, channels),
            of_bin[order], weights[order], rows, len(table))
    return table.view(batch, height, width, channels).permute(0, 3, 1, 2)


def _neighbours(locations: Tensor, shapes: Sequence[tuple[int, int]]
                ) -> tuple[Tensor, Tensor]:
    """Return what deformable attention's half kernel reads, and weights.

    A point that is not inside a level by less than one pixel, or not finite,
    is passed over, and so is a neighbour outside.

    Args:
        locations: ``(batch, queries, heads, levels, points, 2)``, x and y
            from 0 to 1, half.
        shapes: Height and width of each level.

    Returns:
        Keys ``(batch, queries, heads, levels, points, 4)`` among those of
        all levels, -1 for none, and weights likewise, half.
    """
    keys, weights, first = [], [], 0
    for level, (height, width) in enumerate(shapes):
        size = locations.new_tensor([width, height])
        # A product in half, a difference in double, rounded to half.
        point = ((locations[:, :, :, level] * size).double() - .5).to(
            locations.dtype)
        seen = ((point > -1) & (point < size)).all(-1, keepdim=True)
        point = torch.where(seen, point, 0.)
        low = point.detach().floor()
        far = point - low
        near = 1. - far
        x, y = low.long().unbind(-1)
        for down, across in ((0, 0), (0, 1), (1, 0), (1, 1)):
            row, column = y + down, x + across
            there = seen[..., 0] & (row >= 0) & (row < height) & (
                column >= 0) & (column < width)
            keys.append(torch.where(there, first + row * width + column, -1))
            weights.append((far if down else near)[..., 1]
                           * (far if across else near)[..., 0])
        first += height * width
    arranged = [torch.stack(some, -1).unflatten(-1, (len(shapes), 4))
                .transpose(3, 4) for some in (keys, weights)]
    return arranged[0], arranged[1]


def deformable_attention(value: Tensor, shapes: Sequence[tuple[int, int]],
                         locations: Tensor, attention: Tensor) -> Tensor:
    """Compute multi-scale deformable attention; autograd goes through it.

    Args:
        value: ``(batch, keys, heads, channels)``, half.
        shapes: Height and width of each level.
        locations: ``(batch, queries, heads, levels, points, 2)``, x and y
            from 0 to 1, half.
        attention: ``(batch, queries, heads, levels, points)``, half.

    Returns:
        ``(batch, queries, heads * channels)``, half.
    """
    keys, weights = _neighbours(locations, shapes)
    batch, count, heads, channels = value.shape
    image = torch.arange(batch).view(-1, 1, 1, 1, 1, 1)
    head = torch.arange(heads).view(-1, 1, 1, 1)
    nothing = batch * count * heads
    rows = torch.where(keys < 0, nothing,
                       (image * count + keys) * heads + head)
    weights = weights.float() * attention.unsqueeze(-1).float()
    table = functional.pad(value.float().reshape(-1, channels),
                           (0, 0, 0, 1))
    if weights.requires_grad and not table.requires_grad:
        # Torch 2.0 and 2.1 cannot go back to the weights alone.
        table.requires_grad_()
    out = functional.embedding_bag(
        rows.flatten(0, 2).flatten(1), table, mode='sum',
        per_sample_weights=weights.flatten(0, 2).flatten(1),
        padding_idx=nothing)
    return out.view(batch, -1, heads * channels).type_as(value)
