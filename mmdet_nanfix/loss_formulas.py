"""Formulas for losses of MMDetection that are not finite, or wrong, in fp32.

Each stands in for the host's own in fp32, is finite for any finite input, and
equals it wherever that is finite and right:

* any loss of nothing is 0 instead of 0 / 0, and has a graph;
* sigmoid focal loss goes through the logits, not through probabilities;
* CIoU of boxes that coincide, SIoU of boxes without a width, bounded IoU of
  boxes turned inside out divide 0 by 0, or by 0;
* seesaw loss of large logits adds what is lost in their last place;
* triplet loss takes distances as differences of large squares;
* focal matching costs take the log of ``1 - p``, of which nothing is left.
"""
import functools
import inspect
import math
import types
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ['exact_cost', 'finite_forward']

Forward = Callable[..., Any]


def finite_forward(forward: Forward) -> Forward:
    """A forward to use in fp32 in place of a loss's own.

    Args:
        forward: As the loss's class defines it.

    Returns:
        One with the same arguments. Costs no device sync; an empty
        prediction is known by its shape.
    """
    name, _, method = forward.__qualname__.partition('.')
    if forward.__module__.startswith('mmdet.models.losses') and (
            method == 'forward'):
        forward = _MENDED.get(name, lambda same: same)(forward)
    return _of_nothing(forward)


def exact_cost(method: Forward) -> Optional[Forward]:
    """What to call in fp32 in place of a matching cost's method, or None."""
    if not method.__module__.startswith('mmdet.models.task_modules'):
        return None
    return _COSTS.get(method.__qualname__)


def _of_nothing(forward: Forward) -> Forward:

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        pred = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(pred, Tensor) or pred.numel():
            return out
        return _finite(out, pred.sum() * 0.)

    return call


def _finite(out: Any, zero: Tensor) -> Any:
    """The losses in what a forward returns, 0 where they are 0 / 0."""
    if isinstance(out, dict):
        return type(out)({key: _finite(value, zero)
                          for key, value in out.items()})
    if isinstance(out, (list, tuple)):
        return type(out)(_finite(value, zero) for value in out)
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return out
    return torch.where(out.isfinite(), out, zero) + zero


def _one_hot_targets(forward: Forward) -> Forward:
    """Focal loss by its formula, not by mmcv's kernel.

    The fp32 kernel takes ``log(1 - p)`` of a rounded p: from a logit of 17
    on it is log(FLT_MIN) = -87, whatever the logit. The formula goes through
    the logit itself. It is what mmdet takes for one-hot targets.
    """

    @functools.wraps(forward)
    def call(self: Any, pred: Tensor, target: Tensor, *args: Any,
             **kwargs: Any) -> Any:
        if self.use_sigmoid and not self.activated and (
                pred.dim() != target.dim()):
            classes = pred.size(1)
            target = functional.one_hot(
                target, num_classes=classes + 1)[:, :classes]
        return forward(self, pred, target, *args, **kwargs)

    return call


def _largest_at_zero(forward: Forward) -> Forward:
    """Seesaw loss of logits that are shifted, which changes no softmax.

    It adds the log of a weight to each: at 65504 an fp32 number has steps
    of 0.008. Classes and objectness have a softmax each.
    """

    @functools.wraps(forward)
    def call(self: Any, cls_score: Tensor, *args: Any, **kwargs: Any) -> Any:
        if cls_score.numel():
            cls_score = torch.cat([
                part - part.detach().amax(-1, keepdim=True)
                for part in (cls_score[..., :-2], cls_score[..., -2:])], -1)
        return forward(self, cls_score, *args, **kwargs)

    return call


def _true_distances(forward: Forward) -> Forward:
    """Triplet loss by the distances themselves.

    Of features of 300, ``|a|^2 + |b|^2 - 2ab`` is off by 0.1 in fp32. A
    sample to which all others are alike has no negative: it costs nothing.
    """

    @functools.wraps(forward)
    def call(self: Any, inputs: Tensor, targets: Tensor) -> Any:
        if not inputs.numel():
            return inputs.sum() * 0.
        if not self.hard_mining:
            return forward(self, inputs, targets)
        distances = torch.cdist(
            inputs, inputs,
            compute_mode='donot_use_mm_for_euclid_dist').clamp(min=1e-6)
        alike = targets[:, None] == targets[None, :]
        farthest = distances.masked_fill(~alike, -math.inf).amax(1)
        nearest = distances.masked_fill(alike, math.inf).amin(1)
        return self.loss_weight * self.ranking_loss(
            nearest, farthest, torch.ones_like(nearest))

    return call


def _with(name: str, formula: Forward) -> Callable[[Forward], Forward]:
    """The host's forward, with its weights and reductions, and our formula.

    Args:
        name: Of the function of single boxes that the forward calls.
        formula: To call in its place.
    """

    def make(forward: Forward) -> Forward:
        forward = inspect.unwrap(forward)
        scope: Dict[str, Any] = forward.__globals__
        if name not in scope or 'weighted_loss' not in scope:
            return forward
        made = types.FunctionType(
            forward.__code__,
            {**scope, name: scope['weighted_loss'](formula)},
            forward.__name__, forward.__defaults__, forward.__closure__)
        made.__kwdefaults__ = forward.__kwdefaults__
        return functools.update_wrapper(made, forward)

    return make


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """A quotient; over 0 a large constant of its sign, and 0 for 0 / 0."""
    zero = denominator == 0
    large = numerator.sign() * torch.full_like(denominator, 1e6).copysign(
        denominator)
    return torch.where(zero, large.detach(),
                       numerator / torch.where(zero, 1., denominator))


def _sizes(boxes: Tensor) -> Tuple[Tensor, Tensor]:
    return boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]


def _overlap(pred: Tensor, target: Tensor, eps: float) -> Tensor:
    """IoU of each pair of boxes."""
    low = torch.max(pred[:, :2], target[:, :2])
    high = torch.min(pred[:, 2:], target[:, 2:])
    sides = (high - low).clamp(min=0)
    both = sides[:, 0] * sides[:, 1]
    areas = [width * height for width, height in map(
        _sizes, (pred, target))]
    return _over(both, areas[0] + areas[1] - both + eps)


def _enclosing(pred: Tensor, target: Tensor, least: float) -> Tensor:
    """Width and height of the box around each pair, ``(n, 2)``."""
    return (torch.max(pred[:, 2:], target[:, 2:])
            - torch.min(pred[:, :2], target[:, :2])).clamp(min=least)


def _between(pred: Tensor, target: Tensor) -> Tensor:
    """From the centre of each predicted box to that of its target."""
    return (target[:, :2] + target[:, 2:] - pred[:, :2] - pred[:, 2:]) / 2


def _ciou(pred: Tensor, target: Tensor, eps: float = 1e-7) -> Tensor:
    """Complete IoU loss, https://arxiv.org/abs/2005.03572, eq. 8 to 11."""
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


def _siou(pred: Tensor, target: Tensor, eps: float = 1e-7,
          neg_gamma: bool = False) -> Tensor:
    """SIoU loss, https://arxiv.org/abs/2205.12740, eq. 1 to 5."""
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


def _bounded_iou(pred: Tensor, target: Tensor, beta: float = 0.2,
                 eps: float = 1e-3) -> Tensor:
    """Bounded IoU loss, https://arxiv.org/abs/1711.00164, eq. 11 to 15."""
    off = _between(pred, target.detach()).abs() * 2
    terms = []
    for axis, (own, true) in enumerate(zip(
            _sizes(pred), _sizes(target.detach()))):
        far = off[:, axis]
        centre = _over(true - far, true + far + eps)
        terms.append((axis, 1 - centre.clamp(min=0.)))
        size = torch.min(_over(true, own + eps), _over(own, true + eps))
        terms.append((axis + 2, 1 - size))
    loss = torch.stack([term for _, term in sorted(
        terms, key=lambda item: item[0])], 1)
    return torch.where(loss < beta, loss.square() * (0.5 / beta),
                       loss - 0.5 * beta)


_MENDED: Dict[str, Callable[[Forward], Forward]] = {
    'BoundedIoULoss': _with('bounded_iou_loss', _bounded_iou),
    'CIoULoss': _with('ciou_loss', _ciou),
    'FocalLoss': _one_hot_targets,
    'SIoULoss': _with('siou_loss', _siou),
    'SeesawLoss': _largest_at_zero,
    'TripletLoss': _true_distances,
}


def _focal_cost(self: Any, cls_pred: Tensor, gt_labels: Tensor) -> Tensor:
    """Focal cost of each prediction for each true object.

    ``1 - sigmoid(x)`` is ``sigmoid(-x)``: in fp32 the former is wrong by a
    half at a logit of 17. For labels the difference of the costs of being
    positive and negative; for masks and maps of classes their sum.
    """
    logits = cls_pred if gt_labels.dim() == 1 else cls_pred.flatten(1)
    p, q = logits.sigmoid(), (-logits).sigmoid()
    positive = -self.alpha * q.pow(self.gamma) * (p + self.eps).log()
    negative = -(1 - self.alpha) * p.pow(self.gamma) * (q + self.eps).log()
    if gt_labels.dim() == 1:
        return (positive - negative)[:, gt_labels] * self.weight
    true = gt_labels.flatten(1).to(positive.dtype)
    return (positive @ true.T + negative @ (1 - true).T) * self.weight


def _mask_focal_cost(self: Any, cls_pred: Tensor,
                     gt_labels: Tensor) -> Tensor:
    return _focal_cost(self, cls_pred.flatten(1), gt_labels.flatten(1)) / (
        cls_pred.flatten(1).size(1))


_COSTS: Dict[str, Forward] = {
    'BinaryFocalLossCost._focal_loss_cost': _focal_cost,
    'FocalLossCost._focal_loss_cost': _focal_cost,
    'FocalLossCost._mask_focal_loss_cost': _mask_focal_cost,
}
