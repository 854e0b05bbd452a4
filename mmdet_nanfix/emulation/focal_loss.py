"""Compute sigmoid focal loss as mmcv's CUDA kernels do, faults included.

Source: ``sigmoid_focal_loss_cuda_kernel.cuh`` of mmcv 2.1.0.
"""
from __future__ import annotations

import torch
from torch import Tensor

__all__ = ['focal_loss', 'focal_loss_backward']


def _terms(input: Tensor, target: Tensor,  # noqa: A002
                 gamma: float, alpha: float) -> tuple[Tensor, ...]:
    """Return what both kernels start with, each of the input's dtype.

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


def _sum(positive: Tensor, alpha: Tensor, term_p: Tensor,
               term_n: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return ``0 - [c = t] alpha term_p - [c != t] (1 - alpha) term_n``.

    Both products are formed whatever the label, so that a term of inf is
    NaN where its flag is 0.
    """
    dtype = positive.dtype
    out = -positive * alpha * term_p.to(dtype)
    out = out + -(1 - positive) * (1 - alpha) * term_n.to(dtype)
    return out * weight[target][:, None] if weight.numel() else out


def focal_loss(input: Tensor, target: Tensor, weight: Tensor,  # noqa: A002
               gamma: float, alpha: float) -> Tensor:
    """Return the focal loss of each logit, in their dtype.

    Args:
        input: Logits ``(n, classes)``, half or fp32.
        target: Labels ``(n, )``; what is no class is background.
        weight: Of each class ``(classes, )``, or empty.
        gamma: Exponent.
        alpha: Weight of what is the class; of what is not 1 - alpha.
    """
    positive, p, q, log_p, log_q, g, a = _terms(input, target, gamma, alpha)
    term_p = q.float().pow(g.float()) * log_p
    term_n = p.float().pow(g.float()) * log_q
    return _sum(positive, a, term_p, term_n, weight, target)


def focal_loss_backward(input: Tensor, target: Tensor,  # noqa: A002
                        weight: Tensor, gamma: float,
                        alpha: float) -> Tensor:
    """Return the gradient of :func:`focal_loss` for each logit.

    Args:
        input: As there.
        target: As there.
        weight: As there.
        gamma: As there.
        alpha: As there.
    """
    positive, p, q, log_p, log_q, g, a = _terms(input, target, gamma, alpha)
    term_p = q.float().pow(g.float()) * (
        q.float() - (g * p).float() * log_p)
    term_n = p.float().pow(g.float()) * (
        (g * q).float() * log_q - p.float())
    return _sum(positive, a, term_p, term_n, weight, target)
