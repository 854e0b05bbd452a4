"""Inputs for every loss and matching cost of MMDetection, healthy and not.

For each class: arguments to build it with, and named inputs in fp64. The
values are such that half can hold them: up to 65504, boxes of up to 4000
pixels, logits of up to 60 and far beyond, nothing at all, boxes that are
identical or have no size.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Tuple

import torch
from mmengine.structures import InstanceData
from torch import Tensor

__all__ = ['COSTS', 'LOSSES', 'Inputs', 'every', 'rounded']

Inputs = Dict[str, Tuple[Any, ...]]
LARGEST = 65504.
CLASSES = 4


def rounded(value: Any, dtype: torch.dtype) -> Any:
    """The same value with its floating tensors in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, InstanceData):
        return InstanceData(**{key: rounded(item, dtype)
                               for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(rounded(item, dtype) for item in value)
    return value


def _numbers(*shape: int, scale: float = 1., seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).double() * scale


def _signs(*shape: int) -> Tensor:
    return _numbers(*shape, seed=2).sign()


LABELS = torch.tensor([0, 1, 2, 3, 1])


def _logits(*rest: Any, labels: Tensor = LABELS,
            classes: int = CLASSES) -> Inputs:
    """Of all sizes, for five samples of some classes."""
    count = len(labels)
    found = {name: _signs(count, classes) * size for name, size in (
        ('logits of 8', 8.4), ('logits of 17', 17.5), ('logits of 60', 60.),
        ('largest logits', LARGEST))}
    found['healthy'] = _numbers(count, classes, scale=3.)
    inputs: Inputs = {name: (logits, labels, *rest)
                      for name, logits in found.items()}
    inputs['empty'] = (found['healthy'][:0], labels[:0], *(
        item[:0] for item in rest))
    return inputs


def _boxes(count: int = 5, seed: int = 0, size: float = 100.) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * size
    side = (torch.rand(count, 2, generator=generator) + .2) * size
    # What half can hold, so that identical boxes are.
    return torch.cat([corner, corner + side], 1).half().double()


def _pairs() -> Inputs:
    """Predicted and true boxes."""
    pred, true = _boxes(), _boxes(seed=1)
    points = pred.clone()
    points[:, 2:] = points[:, :2]
    flat, thin = pred.clone(), pred.clone()
    flat[:, 3], thin[:, 2] = flat[:, 1], thin[:, 0]
    return {
        'healthy': (pred, true),
        'sides of 4000': (_boxes(size=2000.) * 1.5, _boxes(seed=1,
                                                           size=2000.) * 1.5),
        'far apart': (pred, true + 20000.),
        'barely overlapping': (
            torch.tensor([[0., 0., 100., 100.]]).double(),
            torch.tensor([[99., 99.5, 200., 200.]]).double()),
        'identical': (pred, pred.clone()),
        'no size, identical': (points, points.clone()),
        'predicted without size': (points, true),
        'true without size': (pred, points),
        'no height': (flat, true),
        'no width': (thin, true),
        'no width, identical': (thin, thin.clone()),
        'inside out': (pred[:, [2, 3, 0, 1]], true),
        'inside out, around': (
            torch.tensor([[2000., 2000., 0., 0.]]).double(),
            torch.tensor([[900., 900., 901., 901.]]).double()),
        'largest': (
            torch.tensor([[0., 0., LARGEST, LARGEST]]).double(),
            torch.tensor([[-LARGEST, -LARGEST, 0., 0.]]).double()),
        'empty': (pred[:0], true[:0]),
    }


def _differences(*rest: Any) -> Inputs:
    """Predicted and true numbers."""
    true = _numbers(5, 4, seed=1)
    signs = _signs(5, 4)
    return {
        'healthy': (_numbers(5, 4), true, *rest),
        'differences of 300': (signs * 300., true, *rest),
        'sides of 4000': (signs * 4000., true, *rest),
        'largest': (signs * LARGEST, -signs * LARGEST, *rest),
        'identical': (true, true.clone(), *rest),
        'empty': (true[:0], true[:0], *(item[:0] for item in rest)),
    }


def _heatmaps() -> Inputs:
    true = _numbers(1, 2, 4, 4, seed=1).sigmoid()
    true[0, 0, 1, 1] = 1.
    sure = torch.zeros(1, 2, 4, 4).double()
    return {
        'healthy': (_numbers(1, 2, 4, 4).sigmoid(), true),
        'scores of 1': (sure + 1., true),
        'scores of 0': (sure, true),
        'empty': (sure[:0], true[:0]),
    }


def _masks() -> Inputs:
    true = (_numbers(3, 40, seed=1) > 0).double()
    signs = _signs(3, 40)
    return {
        'healthy': (_numbers(3, 40, scale=3.), true),
        'logits of 60': (signs * 60., true),
        'largest logits': (signs * LARGEST, true),
        'all alike': (signs.abs() * -60., true * 0.),
        'empty': (signs[:0], true[:0]),
    }


def _qualities() -> Inputs:
    quality = torch.linspace(0., 1., 5).double()
    inputs = _logits()
    return {name: (logits, (labels, quality[:len(labels)]))
            for name, (logits, labels) in inputs.items()}


def _soft(name: str) -> Callable[[], Inputs]:
    """Targets of the shape of the predictions: scores, or a teacher's."""

    def inputs() -> Inputs:
        true = _numbers(5, CLASSES, seed=1)
        true = true.sigmoid() if name == 'scores' else true * 9.
        return {key: (logits, true[:len(logits)])
                for key, (logits, _) in _logits().items()}

    return inputs


def _distances() -> Inputs:
    place = torch.linspace(0., CLASSES - 1.5, 5).double()
    return {name: (logits, place[:len(logits)])
            for name, (logits, _) in _logits().items()}


def _embeddings() -> Inputs:
    match = [[[[0, 0], [1, 1]], [[1, 0], [2, 2]]]]
    return {name: (value, value.flip(-1), match) for name, value in (
        ('healthy', _numbers(1, 1, 3, 3)),
        ('embeddings of 300', _signs(1, 1, 3, 3) * 300.),
        ('largest', _signs(1, 1, 3, 3) * LARGEST),
        ('identical', torch.ones(1, 1, 3, 3).double()))}


def _features() -> Inputs:
    people = torch.tensor([0, 0, 1, 1, 2])
    return {
        'healthy': (_numbers(5, 8), people),
        'features of 300': (_signs(5, 8) * 300. + _numbers(5, 8), people),
        'identical': (torch.ones(5, 8).double(), people),
    }


def _similarities() -> Inputs:
    match = torch.eye(4).double()
    return {
        'healthy': (_numbers(4, 4).sigmoid(), match),
        'logits of 60': (_signs(4, 4) * 60., match),
        'largest': (_signs(4, 4) * LARGEST, match),
        'empty': (match[:0], match[:0]),
    }


def _positives() -> Inputs:
    match = torch.eye(4).double()
    inputs = _similarities()
    return {name: (score, match[:len(score)])
            for name, (score, _) in inputs.items()}


def _sigmoid_of(inputs: Callable[[], Inputs]) -> Callable[[], Inputs]:
    """Scores in place of logits, for losses that take them activated."""

    def scores() -> Inputs:
        return {name: (pred.sigmoid(), *rest)
                for name, (pred, *rest) in inputs().items()}

    return scores


def _one_hot() -> Inputs:
    return {name: (logits, torch.eye(CLASSES).double()[labels])
            for name, (logits, labels) in _logits().items()}


def _of_classes() -> Inputs:
    """Masks of each class, the true ones, and their classes."""
    logits = _signs(3, CLASSES, 5, 5)
    true = (_numbers(3, 5, 5, seed=1) > 0).double()
    labels = torch.tensor([0, 2, 3])
    return {name: (value, true, labels) for name, value in (
        ('healthy', _numbers(3, CLASSES, 5, 5)), ('logits of 60',
                                                 logits * 60.),
        ('largest logits', logits * LARGEST))}


Table = Tuple[Tuple[str, Dict[str, Any], Callable[[], Inputs]], ...]
#: Class, arguments to build it with, and its inputs.
LOSSES: Table = (
    ('AssociativeEmbeddingLoss', {}, _embeddings),
    ('BalancedL1Loss', {}, _differences),
    ('BoundedIoULoss', {}, _pairs),
    ('CIoULoss', {}, _pairs),
    ('CrossEntropyCustomLoss', dict(num_classes=CLASSES), _logits),
    ('CrossEntropyLoss', {}, _logits),
    ('CrossEntropyLoss', dict(use_sigmoid=True), _logits),
    ('CrossEntropyLoss', dict(use_sigmoid=True), _one_hot),
    ('CrossEntropyLoss', dict(use_mask=True), _of_classes),
    ('DIoULoss', {}, _pairs),
    ('DiceLoss', {}, _masks),
    ('DiceLoss', dict(naive_dice=True, eps=1.), _masks),
    ('DistributionFocalLoss', {}, _distances),
    ('EIoULoss', {}, _pairs),
    ('EQLV2Loss', dict(num_classes=CLASSES - 1), _logits),
    ('FocalCustomLoss', dict(num_classes=CLASSES), _logits),
    ('FocalLoss', {}, _logits),
    ('FocalLoss', dict(activated=True), _sigmoid_of(_one_hot)),
    ('GHMC', {}, lambda: _logits(torch.ones(5).double())),
    ('GHMR', {}, lambda: _differences(torch.ones(5, 4).double())),
    ('GIoULoss', {}, _pairs),
    ('GaussianFocalLoss', {}, _heatmaps),
    ('IoULoss', {}, _pairs),
    ('IoULoss', dict(mode='linear'), _pairs),
    ('IoULoss', dict(mode='square'), _pairs),
    ('KnowledgeDistillationKLDivLoss', {}, _soft('teacher')),
    ('L1Loss', {}, _differences),
    ('L2Loss', {}, _similarities),
    ('L2Loss', dict(neg_pos_ub=3, pos_margin=0., neg_margin=.1,
                    hard_mining=True), _similarities),
    ('MSELoss', {}, _differences),
    ('MarginL2Loss', {}, _similarities),
    ('MultiPosCrossEntropyLoss', {}, _positives),
    ('QualityFocalLoss', {}, _qualities),
    ('QualityFocalLoss', dict(activated=True), _sigmoid_of(_qualities)),
    ('SIoULoss', {}, _pairs),
    ('SIoULoss', dict(neg_gamma=True), _pairs),
    ('SeesawLoss', dict(num_classes=CLASSES),
     lambda: _logits(classes=CLASSES + 2)),
    ('SmoothL1Loss', {}, _differences),
    ('SmoothL1Loss', dict(beta=1. / 9.), _differences),
    ('TripletLoss', {}, _features),
    ('VarifocalLoss', {}, _soft('scores')),
)


def _instances(**fields: Any) -> InstanceData:
    return InstanceData(**fields)


def _scores(**more: Any) -> Callable[[], Inputs]:

    def inputs() -> Inputs:
        true = _instances(labels=torch.tensor([1, 3]), **more)
        return {name: (_instances(scores=logits), true) for name, (
            logits, _) in _logits().items() if name != 'empty'}

    return inputs


def _matched_boxes() -> Inputs:
    return {name: (_instances(bboxes=pred), _instances(bboxes=true))
            for name, (pred, true) in _pairs().items()}


def _matched_masks() -> Inputs:
    return {name: (_instances(masks=pred), _instances(masks=true))
            for name, (pred, true) in _masks().items() if name != 'empty'}


COSTS: Table = (
    ('BBoxL1Cost', {}, _matched_boxes),
    ('BBoxL1Cost', dict(box_format='xywh'), _matched_boxes),
    ('BinaryFocalLossCost', {}, _scores(
        text_token_mask=torch.ones(2, CLASSES).bool(),
        positive_maps=torch.eye(CLASSES)[:2].double())),
    ('ClassificationCost', {}, _scores()),
    ('CrossEntropyLossCost', {}, _matched_masks),
    ('DiceCost', dict(pred_act=True), _matched_masks),
    ('DiceCost', dict(pred_act=True, naive_dice=False), _matched_masks),
    ('FocalLossCost', {}, _scores()),
    ('FocalLossCost', dict(binary_input=True), _matched_masks),
    ('IoUCost', {}, _matched_boxes),
    ('IoUCost', dict(iou_mode='iou'), _matched_boxes),
)


def every(table: Table) -> Iterator[
        tuple[str, dict[str, Any], str, tuple[Any, ...]]]:
    """Class, how to build it, and each of its inputs with its name."""
    for name, options, inputs in table:
        for called, args in inputs().items():
            yield name, options, called, args
