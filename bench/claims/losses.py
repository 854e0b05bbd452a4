"""What losses and matching costs of MMDetection give in half, and in fp32.

``python bench/claims/losses.py`` prints the tables of the README: for each
class the input of ``lib/loss_inputs.py`` on which stock is worst and ours is
right (the first one where stock is right on all), the largest ones that no
detector has left out. Predictions are half, targets
fp32, under the emulation of CUDA's autocast; gradients are those of half
predictions at a loss scale of 512: one that does not fit there is inf
whatever the formula. ``Ours`` is ``Fp32<Name>``, for matching costs the
regions; the reference is the same formula in fp64.
"""
from __future__ import annotations

import os
import sys
import warnings
from typing import Any, Iterator
from unittest import mock

import torch
from mmdet.models.task_modules.assigners import HungarianAssigner
from mmdet.registry import MODELS
from mmdet.utils import register_all_modules
from torch import Tensor, nn

from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.fp32 import regions
from mmdet_nanfix.fp32.score_losses import exact_cost
from mmdet_nanfix.losses import register_losses

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))), 'lib'))

from loss_inputs import COSTS, LOSSES, every, rounded

__all__ = ['cost_rows', 'loss_rows']

UNREAL = ('largest', 'inside out', 'embeddings', 'empty')
# A share of the largest entry that counts as right, not as noise.
RIGHT = 1e-2
META = dict(img_shape=(4000, 4000))
SCALE = 512.
HALF_MAX = 65504.


def _total(out: Any) -> Tensor:
    if isinstance(out, dict):
        out = tuple(out.values())
    return sum(map(_total, out)) if isinstance(out, tuple) else out.sum()


def _value_and_gradient(module: nn.Module, args: tuple[Any, ...],
                        scale: float) -> tuple[float, Tensor]:
    pred, *rest = args
    pred = pred.detach().requires_grad_()
    out = _total(module(pred * 1, *rest))
    (out.float() * scale if out.dtype != torch.float64 else out).backward()
    return out.item(), pred.grad.double() / (
        1. if out.dtype == torch.float64 else scale)


def _off(own: Tensor, true: Tensor) -> float:
    """Relative to the largest entry that half can hold; inf for NaN."""
    fits = (true.abs() * SCALE <= HALF_MAX) | ~true.isfinite()
    own, true = own[fits], true[fits]
    if not own.isfinite().all():
        return float('inf')
    if not own.numel() or not true.isfinite().all():
        return 0.
    largest = max(float(true.abs().max()), 1e-3)
    return float((own - true).abs().max()) / largest


def _number(value: float) -> str:
    return f'{value:.3g}'


def _judged(own: Tensor, true: Tensor) -> str:
    off = _off(own, true)
    if off == float('inf'):
        bad = int((~own.isfinite()).sum())
        return f'{bad} of {own.numel()} NaN or inf'
    if not true.isfinite().all():
        return 'finite'
    if not own.isfinite().all():
        return 'too large for half'
    return 'right' if off < RIGHT else f'off by {min(off, 9.99):.0%}'


def loss_rows() -> Iterator[str]:
    """Markdown rows of all losses as mmdet builds them by default."""
    ours = register_losses()
    for name, options, inputs in LOSSES:
        if set(options) - {'num_classes'}:
            continue
        found: list[tuple[Any, ...]] = []
        for _, _, called, args in every(((name, options, inputs), )):
            if called.startswith(UNREAL):
                continue
            args = rounded(args, torch.float16)
            mixed = (args[0], *rounded(tuple(args[1:]), torch.float32))
            with mock.patch.object(Tensor, 'float', Tensor.double):
                true = _value_and_gradient(
                    MODELS.get(name)(**options).double(),
                    rounded(args, torch.float64), 1.)
            with cuda_autocast():
                try:
                    stock = _value_and_gradient(
                        MODELS.get(name)(**options), mixed, SCALE)
                except RuntimeError as error:
                    stock = (float('nan'), args[0].double() * float('nan'))
                    said = f'raises: {str(error).split(",")[0][:60]}'
                else:
                    said = f'{_number(stock[0])}; {_judged(stock[1], true[1])}'
                own = _value_and_gradient(
                    ours[f'Fp32{name}'](**options), mixed, SCALE)
            worst = max(_off(torch.tensor(stock[0] / SCALE),
                             torch.tensor(true[0] / SCALE)),
                        _off(stock[1], true[1]))
            right = _off(own[1], true[1]) < RIGHT
            found.append((right, max(worst, RIGHT), -len(found),
                          f'| {name} | {called} | {said} '
                          f'| {_number(own[0])}; '
                          f'{_judged(own[1], true[1])} |'))
        yield max(found)[-1]


class _Head(nn.Module):

    def __init__(self, **cost: Any) -> None:
        super().__init__()
        self.assigner = HungarianAssigner([cost])


def cost_rows() -> Iterator[str]:
    """Markdown rows of all matching costs: the largest entry."""
    for name, options, inputs in COSTS:
        if set(options) - {'pred_act'}:
            continue
        head = _Head(type=name, **options)
        (cost, ) = head.assigner.match_costs
        found: list[tuple[Any, ...]] = []
        regions.install(head, mend_cost=exact_cost)
        for _, _, called, args in every(((name, options, inputs), )):
            if called.startswith(UNREAL):
                continue
            args = rounded(args, torch.float16)
            mixed = (args[0], rounded(args[1], torch.float32))
            with mock.patch.object(Tensor, 'float', Tensor.double):
                true = cost(*rounded(args, torch.float64), img_meta=META)
            with cuda_autocast():
                stock = cost(*mixed, img_meta=META).double()
                with regions.switched('heads', 'cpu'):
                    own = cost(*mixed, img_meta=META).double()
            found.append((max(_off(stock, true), RIGHT), -len(found),
                          f'| {name} | {called} | {_judged(stock, true)} | '
                          f'{_judged(own, true)} |'))
        yield max(found)[2]


def main() -> None:
    """Print both tables."""
    warnings.simplefilter('ignore')
    register_all_modules()
    print('| loss | input | stock in half: value; gradient | ours |')
    print('|---|---|---|---|')
    print('\n'.join(loss_rows()))
    print()
    print('| matching cost | input | stock in half | ours |')
    print('|---|---|---|---|')
    print('\n'.join(cost_rows()))


if __name__ == '__main__':
    main()
