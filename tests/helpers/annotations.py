"""Samples with annotations."""
from __future__ import annotations

import torch
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import HorizontalBoxes
from mmengine.structures import InstanceData

GOOD = [1., 1., 5., 5.]


def sample(boxes, labels=None, wrap=False):
    boxes = torch.tensor(boxes).reshape(-1, 4)
    out = DetDataSample(metainfo=dict(img_path='a.jpg', img_id=7))
    out.gt_instances = InstanceData(
        bboxes=HorizontalBoxes(boxes) if wrap else boxes,
        labels=torch.tensor(labels if labels is not None
                            else [0] * len(boxes), dtype=torch.long))
    return out
