"""Annotations that no loss can be computed from.

Samples are looked at by their attributes, as MMDetection's
``DetDataSample`` has them: ``gt_instances`` with ``bboxes`` and ``labels``,
``img_path`` and ``img_id``.
"""
import copy
import dataclasses
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch
from torch import Tensor

__all__ = ['BadAnnotation', 'bad_annotations', 'repaired']


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
    """

    sample: int
    index: int
    bbox: List[float]
    label: Optional[int]
    what: str
    img_path: Optional[str] = None
    img_id: Any = None

    def to_image(self) -> Dict[str, Any]:
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


def _boxes(instances: Any) -> Optional[Tensor]:
    """Boxes as ``(n, 4)``, or None where there are no such boxes."""
    boxes = getattr(instances, 'bboxes', None)
    boxes = getattr(boxes, 'tensor', boxes)
    if isinstance(boxes, Tensor) and boxes.dim() == 2 and boxes.size(1) == 4:
        return boxes
    return None


def _labels(instances: Any) -> Optional[Tensor]:
    labels = getattr(instances, 'labels', None)
    return labels if isinstance(labels, Tensor) and labels.dim() == 1 else (
        None)


def _complaint(bbox: Sequence[float], label: Optional[int],
               num_classes: Optional[int]) -> Optional[str]:
    box = torch.tensor(bbox)
    if not torch.isfinite(box).all():
        return 'box is not finite'
    width, height = bbox[2] - bbox[0], bbox[3] - bbox[1]
    if width < 0 or height < 0:
        return f'box of negative size {width:g} x {height:g}'
    if width == 0 or height == 0:
        return f'box of zero size {width:g} x {height:g}'
    if label is not None and (label < 0 or (
            num_classes is not None and label >= num_classes)):
        return f'label {label} is outside of 0 to {(num_classes or 0) - 1}' \
            if num_classes else f'label {label} is negative'
    return None


def bad_annotations(samples: Any, num_classes: Optional[int] = None
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
        for index, (bbox, label) in enumerate(
                zip(boxes.detach().float().tolist(), named)):
            what = _complaint(bbox, label, num_classes)
            if what is not None:
                yield BadAnnotation(
                    at, index, bbox, label, what,
                    getattr(sample, 'img_path', None),
                    getattr(sample, 'img_id', None))


def repaired(samples: Sequence[Any],
             bad: Sequence[BadAnnotation]) -> List[Any]:
    """Copies of the samples with something fine in each bad place.

    The box and the label of a good annotation of the same image, or a small
    box at its corner and label 0. The numbers of annotations stay: what
    depends on them is not the annotation's fault.
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
        mended.append(sample)
    return mended
