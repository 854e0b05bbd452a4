"""Faster R-CNN R18-FPN, small enough to train on two cores.

Trained from scratch, so BatchNorm is trained too and nothing is downloaded.
"""
_base_ = [
    'mmdet::_base_/models/faster-rcnn_r50_fpn.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        depth=18,
        frozen_stages=-1,
        norm_cfg=dict(requires_grad=True),
        norm_eval=False,
        init_cfg=None),
    neck=dict(in_channels=[64, 128, 256, 512], out_channels=64),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(scales=[6])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64),
        bbox_head=dict(
            in_channels=64,
            fc_out_channels=256)),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=100),
        rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=100)))

env_cfg = dict(mp_cfg=dict(mp_start_method='fork', opencv_num_threads=1))
default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(interval=-1, save_last=True))
visualizer = dict(
    vis_backends=[
        dict(type='LocalVisBackend'),
        dict(type='TensorboardVisBackend'),
    ])
randomness = dict(seed=0)
