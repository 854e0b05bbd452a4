"""Replace losses of MMDetection that are not finite, or wrong, in fp32.

Each stands in for the host's own in fp32, is finite for any input that half
can hold, and equals it wherever that is finite and right:

* any loss of nothing is 0 instead of 0 / 0, and has a graph;
* sigmoid focal loss goes through the logits, not through probabilities;
* some IoU losses divide by 0 (:mod:`.box_losses`);
* seesaw loss of large logits adds what is lost in their last place;
* triplet loss takes distances as differences of large squares;
* focal matching costs take the log of ``1 - p``, of which nothing is left.
"""
from __future__ import annotations

import functools
import inspect
import math
import types
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import functional

from .box_losses import bounded_iou, ciou, siou

__all__ = ['exact_cost', 'finite_forward']

Forward = Callable[..., Any]


def finite_forward(forward: Forward) -> Forward:
    """Return a forward to use in fp32 in place of a loss's own.

    Args:
        forward: As the loss's class defines it.

    Returns:
        One with the same arguments. Costs no device sync; an empty
        prediction is known by its shape.
    """
    name, _, method = forward.__qualname__.partition('.')
    if not str(forward.__module__).startswith('mmdet.models.losses') or (
            method != 'forward'):
        return forward
    return _of_nothing(_MENDED.get(name, lambda same: same)(forward))


def exact_cost(method: Forward) -> Forward | None:
    """Return what stands in fp32 for a matching cost's method, or None."""
    if not str(method.__module__).startswith('mmdet.models.task_modules'):
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
    """Return the losses of a forward, 0 where they are 0 / 0."""
    if isinstance(out, dict):
        return type(out)({key: _finite(value, zero)
                          for key, value in out.items()})
    if isinstance(out, (list, tuple)):
        return type(out)(_finite(value, zero) for value in out)
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return out
    return torch.where(out.isfinite(), out, zero) + zero


class _FocalLoss(torch.autograd.Function):
    """Compute sigmoid focal loss, https://arxiv.org/abs/1708.02002.

    With z the logit, or minus the logit of what is not the class, it is
    ``-a sigmoid(-z)^gamma log sigmoid(z)``. Only logits and labels are kept
    for the backward; a step in place saves a copy of all scores.
    """

    @staticmethod
    def _parts(logits: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``sigmoid(-z)`` and ``log sigmoid(z)``."""
        z = torch.where(true, logits, -logits)
        log = functional.logsigmoid(z)
        return z.neg_().sigmoid_(), log

    @staticmethod
    def forward(ctx: Any, logits: Tensor, true: Tensor, gamma: float,
                alpha: float) -> Tensor:
        ctx.save_for_backward(logits, true)
        ctx.constants = gamma, alpha
        missing, log = _FocalLoss._parts(logits, true)
        log.mul_(missing.pow_(gamma))
        return log.mul_(torch.where(true, -alpha, alpha - 1.))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, true = ctx.saved_tensors
        gamma, alpha = ctx.constants
        missing, log = _FocalLoss._parts(logits, true)
        log.mul_((1 - missing).mul_(gamma)).sub_(missing)
        log.mul_(missing.pow_(gamma))
        log.mul_(torch.where(true, alpha, alpha - 1.))
        return log.mul_(grad), None, None, None


def _focal_loss(forward: Forward) -> Forward:
    """Compute focal loss by its formula, not by mmcv's kernel.

    The fp32 kernel takes ``log(1 - p)`` of a rounded p: from a logit of 17
    on it is log(FLT_MIN) = -87, whatever the logit. The formula goes through
    the logit itself. Labels that are no class are background, as there.
    """
    scope: dict[str, Any] = inspect.unwrap(forward).__globals__
    if not {'py_sigmoid_focal_loss', 'weight_reduce_loss'} <= set(scope):
        return forward

    def of_labels(pred: Tensor, target: Tensor,
                  weight: Tensor | None = None, gamma: float = 2.0,
                  alpha: float = 0.25, reduction: str = 'mean',
                  avg_factor: Any = None) -> Tensor:
        if target.dtype != torch.bool:
            return scope['py_sigmoid_focal_loss'](
                pred, target, weight, gamma, alpha, reduction, avg_factor)
        loss = _FocalLoss.apply(pred, target, gamma, alpha)
        if weight is not None and weight.shape != loss.shape:
            # Of each sample, or flattened.
            weight = weight.view(len(loss), -1)
        return scope['weight_reduce_loss'](loss, weight, reduction,
                                           avg_factor)

    own = _in_scope(forward, py_sigmoid_focal_loss=of_labels)

    @functools.wraps(forward)
    def call(self: Any, pred: Tensor, target: Tensor, *args: Any,
             **kwargs: Any) -> Any:
        if not self.use_sigmoid or self.activated or (
                pred.dim() == target.dim()):
            return forward(self, pred, target, *args, **kwargs)
        classes = torch.arange(pred.size(1), device=pred.device)
        return own(self, pred, target[:, None] == classes, *args, **kwargs)

    return call


def _largest_at_zero(forward: Forward) -> Forward:
    """Shift the logits of seesaw loss, which changes no softmax.

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
    """Compute triplet loss by the distances themselves.

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


def _in_scope(forward: Forward, **functions: Forward) -> Forward:
    """Copy a forward, whose code finds other functions by some names."""
    forward = inspect.unwrap(forward)
    made = types.FunctionType(
        forward.__code__, {**forward.__globals__, **functions},
        forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(made, forward)


def _with(name: str, formula: Forward) -> Callable[[Forward], Forward]:
    """Keep the host's weights and reductions, with our formula.

    Args:
        name: Of the function of single boxes that the forward calls.
        formula: To call in its place.
    """

    def make(forward: Forward) -> Forward:
        scope = inspect.unwrap(forward).__globals__
        if name not in scope or 'weighted_loss' not in scope:
            return forward
        return _in_scope(forward, **{name: scope['weighted_loss'](formula)})

    return make


_MENDED: dict[str, Callable[[Forward], Forward]] = {
    'BoundedIoULoss': _with('bounded_iou_loss', bounded_iou),
    'CIoULoss': _with('ciou_loss', ciou),
    'FocalLoss': _focal_loss,
    'SIoULoss': _with('siou_loss', siou),
    'SeesawLoss': _largest_at_zero,
    'TripletLoss': _true_distances,
}


def _focal_cost(self: Any, cls_pred: Tensor, gt_labels: Tensor) -> Tensor:
    """Compute the focal cost of each prediction for each true object.

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


_COSTS: dict[str, Forward] = {
    'BinaryFocalLossCost._focal_loss_cost': _focal_cost,
    'FocalLossCost._focal_loss_cost': _focal_cost,
    'FocalLossCost._mask_focal_loss_cost': _mask_focal_cost,
}
