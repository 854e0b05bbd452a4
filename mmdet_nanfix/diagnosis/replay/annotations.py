"""Annotations that no loss can be computed from.

Samples are looked at by their attributes, as MMDetection's
``DetDataSample`` has them: ``gt_instances`` with ``bboxes`` and ``labels``,
``img_path`` and ``img_id``.
"""
from __future__ import annotations

import copy
import dataclasses
import enum
import math
from typing import Any, Iterator, Sequence, Tuple

import numpy as np
from torch import Tensor

__all__ = ['AnnotationFault', 'BadAnnotation', 'bad_annotations', 'repaired']

# Sides this many times the frame are no object's.
_HUGE = 4
_HUGE_ANYWHERE = 1e5


class AnnotationFault(enum.IntEnum):
    """What is wrong with an annotation, the most likely to blame first."""

    NOT_FINITE = 0
    LABEL = 1
    NEGATIVE_SIZE = 2
    HUGE = 3
    OUTSIDE = 4
    ZERO_SIZE = 5
    MASK_SIZE = 6
    EMPTY_MASK = 7


@dataclasses.dataclass
class BadAnnotation:
    """One annotation and what is wrong with it.

    Attributes:
        sample: Index of its image in the batch.
        index: Index among the annotations of the image.
        bbox: x1, y1, x2, y2 in pixels, as the model saw them.
        label: Class index, or None where there are no labels.
        what: What is wrong, in words.
        img_path: File, or None.
        img_id: Of the dataset, or None.
        fault: The same as a number; the smaller, the more likely it is to
            blame.
    """

    sample: int
    index: int
    bbox: list[float]
    label: int | None
    what: str
    img_path: str | None = None
    img_id: Any = None
    fault: AnnotationFault = AnnotationFault.NOT_FINITE

    def to_image(self) -> dict[str, Any]:
        """As an entry of an incident's ``images``."""
        return {
            'img_path': self.img_path,
            'img_id': self.img_id,
            'annotation': {
                'index': self.index,
                'bbox': self.bbox,
                'label': self.label,
                'what': self.what,
            },
        }


def _boxes(instances: Any) -> Tensor | None:
    """Boxes as ``(n, 4)``, or None where there are no such boxes."""
    boxes = getattr(instances, 'bboxes', None)
    boxes = getattr(boxes, 'tensor', boxes)
    if isinstance(boxes, Tensor) and boxes.dim() == 2 and boxes.size(1) == 4:
        return boxes
    return None


def _labels(instances: Any) -> Tensor | None:
    labels = getattr(instances, 'labels', None)
    return labels if isinstance(labels, Tensor) and labels.dim() == 1 else (
        None)


Complaint = Tuple[AnnotationFault, str]


def _about_box(bbox: Sequence[float],
               frame: Sequence[int] | None) -> Complaint | None:
    if not all(map(math.isfinite, bbox)):
        return AnnotationFault.NOT_FINITE, 'box is not finite'
    width, height = bbox[2] - bbox[0], bbox[3] - bbox[1]
    size = f'{width:g} x {height:g}'
    if width < 0 or height < 0:
        return AnnotationFault.NEGATIVE_SIZE, f'box of negative size {size}'
    if frame is not None:
        rows, columns = frame[:2]
        if max(width, height) > _HUGE * max(rows, columns, 1):
            return AnnotationFault.HUGE, (
                f'box of size {size} in a frame of {columns} x {rows}')
        if bbox[2] < 0 or bbox[3] < 0 or bbox[0] > columns or (
                bbox[1] > rows):
            return AnnotationFault.OUTSIDE, (
                f'box lies outside of the frame of {columns} x {rows}')
    elif max(width, height) > _HUGE_ANYWHERE:
        return AnnotationFault.HUGE, f'box of size {size}'
    if width == 0 or height == 0:
        return AnnotationFault.ZERO_SIZE, f'box of zero size {size}'
    return None


def _about_label(label: int | None,
                 num_classes: int | None) -> Complaint | None:
    if label is None or 0 <= label < (num_classes or math.inf):
        return None
    return AnnotationFault.LABEL, (
        f'label {label} is outside of 0 to {num_classes - 1}'
        if num_classes else f'label {label} is negative')


def _about_mask(masks: Any, index: int,
                frame: Sequence[int] | None) -> Complaint | None:
    size = getattr(masks, 'height', None), getattr(masks, 'width', None)
    if None not in size and frame is not None and size != tuple(frame[:2]):
        return AnnotationFault.MASK_SIZE, (
            f'mask of {size[1]} x {size[0]} in a frame of '
            f'{frame[1]} x {frame[0]}')
    bitmaps = getattr(masks, 'masks', None)
    if isinstance(bitmaps, np.ndarray) and index < len(bitmaps) and not (
            bitmaps[index].any()):
        return AnnotationFault.EMPTY_MASK, 'mask has no pixels'
    return None


def bad_annotations(samples: Any, num_classes: int | None = None
                    ) -> Iterator[BadAnnotation]:
    """Yield what is wrong with the annotations of a batch.

    Reads boxes and labels from the device: for after a failure.

    Args:
        samples: A list of data samples; anything else yields nothing.
        num_classes: Labels are below it; None leaves them unchecked above.
    """
    for at, sample in enumerate(samples if isinstance(
            samples, (list, tuple)) else ()):
        instances = getattr(sample, 'gt_instances', None)
        boxes, labels = _boxes(instances), _labels(instances)
        if boxes is None:
            continue
        named = labels.tolist() if labels is not None else [None] * len(boxes)
        frame = getattr(sample, 'img_shape', None)
        masks = getattr(instances, 'masks', None)
        for index, (bbox, label) in enumerate(
                zip(boxes.detach().float().tolist(), named)):
            found = _about_box(bbox, frame) or _about_label(
                label, num_classes) or _about_mask(masks, index, frame)
            if found is not None:
                yield BadAnnotation(
                    at, index, bbox, label, found[1],
                    getattr(sample, 'img_path', None),
                    getattr(sample, 'img_id', None), found[0])


def repaired(samples: Sequence[Any],
             bad: Sequence[BadAnnotation]) -> list[Any]:
    """Copies of the samples with something fine in each bad place.

    The box and the label of a good annotation of the same image, or a small
    box at its corner and label 0; a mask of all pixels. The numbers of
    annotations stay: what depends on them is not the annotation's fault.
    """
    mended = []
    for at, sample in enumerate(samples):
        wrong = [item.index for item in bad if item.sample == at]
        if wrong:
            sample = copy.deepcopy(sample)
            boxes = _boxes(sample.gt_instances)
            labels = _labels(sample.gt_instances)
            good = next((index for index in range(
                len(boxes) if boxes is not None else 0)
                if index not in wrong), None)
            for index in wrong:
                if boxes is not None:
                    boxes[index] = boxes[good] if good is not None else (
                        boxes.new_tensor([0., 0., 8., 8.]))
                if labels is not None:
                    labels[index] = labels[good] if good is not None else 0
            _mend_masks(sample, wrong)
        mended.append(sample)
    return mended


def _mend_masks(sample: Any, wrong: Sequence[int]) -> None:
    masks: Any = getattr(sample.gt_instances, 'masks', None)
    bitmaps = getattr(masks, 'masks', None)
    frame = getattr(sample, 'img_shape', None)
    if not isinstance(bitmaps, np.ndarray) or frame is None:
        return
    if bitmaps.shape[1:] != tuple(frame[:2]):
        bitmaps = np.ones((len(bitmaps), *frame[:2]), bitmaps.dtype)
    bitmaps[list(wrong)] = 1
    sample.gt_instances.masks = type(masks)(bitmaps, *frame[:2])
