"""Faster R-CNN on any folder in COCO format, in guarded half precision.

COCO_FOLDER names a folder with ``train.json``, ``val.json`` and the images
below ``train/`` and ``val/``; the classes are read from ``train.json``:

    COCO_FOLDER=/path/to/folder python tools/train.py THIS_CONFIG
"""
# MMEngine takes a config that imports before this line for a lazy one.
_base_ = ['_base_small.py']

import json as _json
import os as _os
import pathlib as _pathlib

custom_imports = dict(imports=['mmdet_nanfix'], allow_failed_imports=False)

data_root = _os.path.join(_os.environ.get('COCO_FOLDER', 'data/coco'), '')
if not _os.path.isfile(data_root + 'train.json'):
    raise SystemExit(f'{data_root} has no train.json: let COCO_FOLDER name a '
                     'folder with train.json, val.json, train/ and val/')
classes = tuple(category['name'] for category in _json.loads(
    _pathlib.Path(data_root, 'train.json').read_text())['categories'])

model = dict(roi_head=dict(bbox_head=dict(num_classes=len(classes))))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=(320, 240), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(320, 240), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape',
                   'scale_factor')),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='AspectRatioBatchSampler'),
    dataset=dict(
        type='CocoDataset',
        data_root=data_root,
        ann_file='train.json',
        data_prefix=dict(img='train/'),
        metainfo=dict(classes=classes),
        filter_cfg=dict(filter_empty_gt=True, min_size=1),
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CocoDataset',
        data_root=data_root,
        ann_file='val.json',
        data_prefix=dict(img='val/'),
        metainfo=dict(classes=classes),
        test_mode=True,
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(
    type='CocoMetric', ann_file=data_root + 'val.json', metric='bbox')
test_evaluator = val_evaluator

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=2, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='AmpOptimWrapper',
    optimizer=dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=1e-4),
    clip_grad=dict(max_norm=35, norm_type=2))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=10),
]
