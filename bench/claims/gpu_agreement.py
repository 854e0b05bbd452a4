"""Compare the emulation on a CPU with CUDA autocast itself.

``python bench/claims/gpu_agreement.py`` runs every operation of PyTorch's own
answer key, mmcv's operations, and three detectors, forward and backward, on
both, and prints where they disagree. Exit status: 0 they agree, 1 they do
not, 0 with one line where there is no CUDA device.
"""
from __future__ import annotations

import argparse
import copy
import os
import sys
from typing import Any, Callable, ContextManager, Iterator, Tuple

import torch
from mmcv.ops import RoIAlign, nms, sigmoid_focal_loss
from torch import Tensor
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from mmdet_nanfix.emulation import cuda_autocast

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))), 'lib'))

from families import batch_for, build

__all__ = ['compare_detectors', 'compare_operations']

DETECTORS = ('faster_rcnn', 'retinanet', 'deformable_detr')
# Half has 11 bits. Sums in another order, and a GPU's own exp and log, move
# the last of them; a chain of layers moves more.
ONE_OPERATION = 4 * 2.**-11
WHOLE_DETECTOR = 0.05

Case = Tuple[str, Callable[..., Any], Any]


def region(device: str) -> ContextManager[Any]:
    """Half precision on a device: CUDA's own, or ours."""
    return cuda_autocast() if device == 'cpu' else torch.autocast(
        device, torch.float16)


def moved(value: Any, device: str) -> Any:
    """Tensors of nested containers on a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return value


def listed_operations() -> Iterator[Case]:
    """PyTorch's answer key, with its own arguments."""
    torch.manual_seed(0)
    key = AutocastTestLists(torch.device('cpu'))
    for module, kinds in (
            (torch, ('torch_fp16', 'torch_fp32', 'torch_expect_builtin_'
                     'promote', 'torch_need_autocast_promote')),
            (torch._C._nn, ('nn_fp16', 'nn_fp32')),
            (torch._C._linalg, ('linalg_fp16', )),
            (Tensor, ('methods_fp16', 'methods_fp32',
                      'methods_expect_builtin_promote'))):
        for kind in kinds:
            for name, args, *_ in getattr(key, kind):
                call = getattr(module, name, None)
                if call and not name.startswith('cudnn') and (
                        isinstance(args, (list, tuple))):
                    yield f'{kind} {name}', call, args


def mmcv_operations() -> Iterator[Case]:
    """Operations of mmcv with half inputs."""
    torch.manual_seed(0)
    rois = torch.tensor([[0., 3, 3, 60, 50], [0., 10, 5, 20, 44]]).half()
    features = torch.randn(1, 4, 32, 32).half()
    for ratio in (0, 2):
        yield (f'RoIAlign sampling_ratio={ratio}',
               RoIAlign((7, 7), 0.5, ratio), (features, rois))
    logits = torch.linspace(-20, 20, 82).view(-1, 2).half()
    labels = torch.arange(41) % 3
    yield ('sigmoid_focal_loss', lambda x, t: sigmoid_focal_loss(
        x, t, 2., .25, None, 'none'), (logits, labels))
    boxes = torch.rand(40, 4) * 20
    boxes[:, 2:] += boxes[:, :2] + 4
    yield ('nms', lambda b, s: nms(b, s, .5)[1],
           (boxes, torch.rand(40).half()))


def flat(value: Any) -> list[Tensor]:
    """Tensors of nested containers, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flat(part)]
    return []


def difference(ours: Tensor, theirs: Tensor, bound: float) -> str:
    """What differs between two results, or nothing."""
    theirs = theirs.cpu()
    if ours.dtype != theirs.dtype:
        return f'dtype {ours.dtype} here, {theirs.dtype} there'
    if not ours.is_floating_point():
        return '' if torch.equal(ours, theirs) else 'values differ'
    a, b = ours.double(), theirs.double()
    kinds = (a.isnan() != b.isnan()) | (a.isinf() != b.isinf())
    if kinds.any():
        return f'{int(kinds.sum())} of {a.numel()} non-finite on one side'
    finite = a.isfinite()
    scale = b[finite].abs().max().clamp(min=1e-6) if finite.any() else 1.
    error = ((a - b)[finite].abs() / scale).max() if finite.any() else 0.
    return f'off by {float(error):.2g} of its maximum' if (
        error > bound) else ''


def compare_operations(device: str) -> Iterator[tuple[str, str]]:
    """Name of each operation, and what differs on a device."""
    for name, call, args in (*listed_operations(), *mmcv_operations()):
        results: list[Any] = []
        for place in ('cpu', device):
            torch.manual_seed(0)
            try:
                with region(place):
                    results.append(flat(call(*moved(args, place))))
            except (RuntimeError, NotImplementedError, TypeError) as error:
                results.append(str(error).partition('\n')[0])
        ours, theirs = results
        if isinstance(ours, str) or isinstance(theirs, str):
            same = isinstance(ours, str) and isinstance(theirs, str)
            yield name, '' if same else f'{ours} here, {theirs} there'
        else:
            found = [difference(a, b, ONE_OPERATION)
                     for a, b in zip(ours, theirs)]
            yield name, '; '.join(filter(None, found))


def losses_and_gradients(model: Any, device: str) -> Iterator[
        tuple[str, Tensor]]:
    """Each loss, and each part's gradient norm, of one step."""
    model = copy.deepcopy(model).to(device)
    model.data_preprocessor.to(device)
    torch.manual_seed(0)
    with region(device):
        data = model.data_preprocessor(batch_for(model), True)
        losses = model(**data, mode='loss')
    total, logged = model.parse_losses(losses)
    (total * 64).backward()
    for key, value in logged.items():
        yield f'loss {key}', value.detach().float()
    for name, part in model.named_children():
        grads = [parameter.grad.float().norm()
                 for parameter in part.parameters()
                 if parameter.grad is not None]
        if grads:
            yield f'gradient of {name}', torch.stack(grads).norm()


def compare_detectors(device: str) -> Iterator[tuple[str, str]]:
    """Losses and gradient norms of three detectors on both devices."""
    for name in DETECTORS:
        model = build(name)
        pairs = zip(losses_and_gradients(model, 'cpu'),
                    losses_and_gradients(model, device))
        for (what, ours), (_, theirs) in pairs:
            yield f'{name}: {what}', difference(ours, theirs, WHOLE_DETECTOR)


def main() -> int:
    """Compare and print; returns the exit status."""
    argparse.ArgumentParser(description=__doc__.split('\n')[0]).parse_args()
    if not torch.cuda.is_available():
        print('no CUDA device: nothing to compare the emulation with')
        return 0
    total = bad = 0
    for name, found in (*compare_operations('cuda'),
                        *compare_detectors('cuda')):
        total += 1
        if found:
            bad += 1
            print(f'{name}: {found}')
    print(f'{total - bad} of {total} agree')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
