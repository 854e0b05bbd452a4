"""Compute IoU losses that are finite where the host's divide by 0.

CIoU of boxes that coincide, SIoU of boxes without a width and bounded IoU of
boxes turned inside out divide 0 by 0, or by 0. Each formula takes boxes as
``(n, 4)`` (x1, y1, x2, y2) and returns a loss for each pair.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ['bounded_iou', 'ciou', 'siou']


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide; over 0 a large constant of its sign, and 0 for 0 / 0."""
    zero = denominator == 0
    large = numerator.sign() * torch.full_like(denominator, 1e6).copysign(
        denominator)
    return torch.where(zero, large.detach(),
                       numerator / torch.where(zero, 1., denominator))


def _sizes(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]


def _overlap(pred: Tensor, target: Tensor, eps: float) -> Tensor:
    """Return the IoU of each pair of boxes."""
    low = torch.max(pred[:, :2], target[:, :2])
    high = torch.min(pred[:, 2:], target[:, 2:])
    sides = (high - low).clamp(min=0)
    both = sides[:, 0] * sides[:, 1]
    areas = [width * height for width, height in map(
        _sizes, (pred, target))]
    return _over(both, areas[0] + areas[1] - both + eps)


def _enclosing(pred: Tensor, target: Tensor, least: float) -> Tensor:
    """Return width and height of the box around each pair, ``(n, 2)``."""
    return (torch.max(pred[:, 2:], target[:, 2:])
            - torch.min(pred[:, :2], target[:, :2])).clamp(min=least)


def _between(pred: Tensor, target: Tensor) -> Tensor:
    """Return the way from each predicted centre to that of its target.

    Exactly 0 for boxes that share it, so that ``abs`` has no gradient.
    """
    return ((target[:, :2] + target[:, 2:])
            - (pred[:, :2] + pred[:, 2:])) / 2


def ciou(pred: Tensor, target: Tensor, eps: float = 1e-7) -> Tensor:
    """Compute the complete IoU loss.

    https://arxiv.org/abs/2005.03572, eq. 8 to 11.
    """
    iou = _overlap(pred, target, eps)
    diagonal = _enclosing(pred, target, 0.).square().sum(1) + eps
    distance = _between(pred, target).square().sum(1) / diagonal
    angles = []
    for boxes in (pred, target):
        width, height = _sizes(boxes)
        angles.append(torch.atan(_over(width, height + eps)))
    shape = (angles[1] - angles[0]).square() * (4 / math.pi**2)
    with torch.no_grad():
        # Boxes that coincide: 0 / 0, as 1 - IoU and the term are 0 in fp32.
        trade = (iou > 0.5) * _over(shape, 1 - iou + shape)
    return 1 - (iou - distance - trade * shape).clamp(-1., 1.)


def siou(pred: Tensor, target: Tensor, eps: float = 1e-7,
         neg_gamma: bool = False) -> Tensor:
    """Compute the SIoU loss, https://arxiv.org/abs/2205.12740, eq. 1 to 5."""
    apart = _between(pred, target) + eps
    length = apart.square().sum(1).clamp(min=1e-30).sqrt()
    sines = apart.abs() / length[:, None]
    sine = torch.where(sines[:, 0] > math.sqrt(.5), sines[:, 1],
                       sines[:, 0])
    angle = torch.cos(torch.asin(sine.clamp(max=1.)) * 2 - math.pi / 2)
    gamma = angle - 2 if neg_gamma else 2 - angle
    rho = (apart / _enclosing(pred, target, eps)).square()
    # Boxes turned inside out have large terms of either sign. In fp64, which
    # costs little for so few numbers, they are not inf before the clamp.
    grown = torch.exp((gamma[:, None] * rho).double().clamp(max=700.))
    cost = 2 - grown.sum(1)
    width, height = _sizes(pred)
    true_width, true_height = _sizes(target)
    for own, true in ((width, true_width), (height + eps,
                                            true_height + eps)):
        # Both without a width: 0 / 0.
        omega = _over((own - true).abs(), torch.max(own, true))
        cost = cost + (1 - torch.exp(
            (-omega).double().clamp(max=170.))).pow(4)
    return 1 - (_overlap(pred, target, eps) - 0.5 * cost).clamp(
        -1., 1.).to(pred.dtype)


def bounded_iou(pred: Tensor, target: Tensor, beta: float = 0.2,
                eps: float = 1e-3) -> Tensor:
    """Compute the bounded IoU loss.

    https://arxiv.org/abs/1711.00164, eq. 11 to 15.
    """
    target = target.detach()
    centres, sizes = [], []
    far = _between(pred, target).abs() * 2
    for axis, (own, true) in enumerate(zip(_sizes(pred), _sizes(target))):
        centre = _over(true - far[:, axis], true + far[:, axis] + eps)
        centres.append(1 - torch.max(centre, torch.zeros_like(centre)))
        sizes.append(1 - torch.min(_over(true, own + eps),
                                   _over(own, true + eps)))
    loss = torch.stack([*centres, *sizes], 1)
    return torch.where(loss < beta, loss.square() * (0.5 / beta),
                       loss - 0.5 * beta)
