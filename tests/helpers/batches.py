"""Batches of a detector."""
from __future__ import annotations

from mmdet.testing import demo_mm_inputs
from mmdet.utils import register_all_modules


def batch(count=2):
    register_all_modules()
    made = demo_mm_inputs(count, (3, 32, 32), num_items=[2] * count,
                          num_classes=3, with_mask=True)
    for index, sample in enumerate(made['data_samples']):
        sample.set_metainfo(dict(img_path=f'{index}.jpg', img_id=index))
    return made


def branches():
    def samples(*names):
        made = batch(len(names))
        for name, sample in zip(names, made['data_samples']):
            sample.set_metainfo(dict(img_path=name))
        return made

    sup, teacher = samples('a', 'b'), samples('c', 'd')
    student = samples('c', 'd')
    return {key: dict(sup=sup[key], teacher=teacher[key],
                      student=student[key])
            for key in ('inputs', 'data_samples')}


def boxes(made, row):
    found = made['data_samples'][row].gt_instances.bboxes
    return getattr(found, 'tensor', found)
