"""Detectors of many families, tiny, in emulated half precision.

Made from MMDetection's own configs.
"""
from __future__ import annotations

import copy
import os
from typing import Any, Dict, Iterator, Set, Tuple

import mmdet
import numpy as np
import torch
from mmdet.registry import MODELS
from mmdet.testing import demo_mm_inputs
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.optim import build_optim_wrapper
from torch import Tensor, nn

import mmdet_nanfix  # noqa: F401  registers

__all__ = ['FAMILIES', 'OTHERS', 'REFUSED', 'batch_for', 'build',
           'build_from', 'config', 'has_masks', 'samples_of', 'train']

# By name: kind, and the config below MMDetection's own ``configs/``.
FAMILIES = {
    'faster_rcnn': ('two-stage', 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco'),
    'dynamic_rcnn': ('two-stage', 'dynamic_rcnn/dynamic-rcnn_r50_fpn_1x_'
                     'coco'),
    'cascade_rcnn': ('cascade', 'cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco'),
    'mask_rcnn': ('mask', 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco'),
    'retinanet': ('one-stage', 'retinanet/retinanet_r50_fpn_1x_coco'),
    'atss': ('one-stage', 'atss/atss_r50_fpn_1x_coco'),
    'gfl': ('one-stage', 'gfl/gfl_r50_fpn_1x_coco'),
    'fcos': ('anchor-free', 'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco'),
    'centernet': ('anchor-free', 'centernet/centernet_r18_8xb16-crop512-'
                  '140e_coco'),
    'yolox': ('YOLO', 'yolox/yolox_tiny_8xb8-300e_coco'),
    'yolov3': ('YOLO', 'yolo/yolov3_mobilenetv2_8xb24-ms-416-300e_coco'),
    'rtmdet': ('one-stage', 'rtmdet/rtmdet_tiny_8xb32-300e_coco'),
    'detr': ('DETR', 'detr/detr_r50_8xb2-150e_coco'),
    'deformable_detr': ('DETR', 'deformable_detr/deformable-detr_r50_16xb2-'
                        '50e_coco'),
}
# Refused under stock's autocast: what it says. They train with fp32='heads'.
REFUSED = {
    'autoassign': ('autoassign/autoassign_r50-caffe_fpn_1x_coco',
                   'binary_cross_entropy'),
    'ddq': ('ddq/ddq-detr-4scale_r50_8xb2-12e_coco', 'Index put'),
    'free_anchor': ('free_anchor/freeanchor_r50_fpn_1x_coco',
                    'binary_cross_entropy'),
    'groie': ('groie/mask-rcnn_r50_fpn_groie_1x_coco',
              'expected scalar type Half'),
    'tood': ('tood/tood_r50_fpn_1x_coco', 'binary_cross_entropy'),
    'vfnet': ('vfnet/vfnet_r50_fpn_1x_coco', 'Index put'),
    'yolact': ('yolact/yolact_r50_1xb8-55e_coco', 'binary_cross_entropy'),
}
# The fault suite trains these too.
OTHERS = {
    'condinst': 'condinst/condinst_r50_fpn_ms-poly-90k_coco_instance',
    'grid_rcnn': 'grid_rcnn/grid-rcnn_r50_fpn_gn-head_2x_coco',
    'htc': 'htc/htc_r50_fpn_1x_coco',
    'mask2former': 'mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic',
    'point_rend': 'point_rend/point-rend_r50-caffe_fpn_ms-1x_coco',
    'soft_teacher': 'soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_'
                    '180k_semi-0.1-coco',
    'solo': 'solo/solo_r50_fpn_1x_coco',
    'sparse_rcnn': 'sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco',
    'ssdlite': 'ssd/ssdlite_mobilenetv2-scratch_8xb24-600e_coco',
}
_NARROW = {256: 64, 512: 128, 1024: 256, 2048: 512}


def _shrink(model: Any) -> None:
    """A ResNet of 18 layers, from scratch, BatchNorm trained."""
    if 'detector' in model:  # student and teacher
        _shrink(model.detector)
        return
    backbone = model.backbone
    backbone.init_cfg = None
    if backbone.type == 'ResNet' and backbone.depth == 50:
        backbone.update(depth=18, frozen_stages=-1, norm_eval=False,
                        style='pytorch')
        backbone.norm_cfg = dict(type='BN', requires_grad=True)
        after = model.get('neck') or model.panoptic_head
        after.in_channels = [_NARROW[width] for width in after.in_channels]
    if model.get('data_preprocessor', {}).get('batch_augments'):
        model.data_preprocessor.batch_augments = None
    if model.get('num_queries', 0) > 300:
        model.num_queries = 60


def config(name: str, changes: dict[str, Any] | None = None) -> Config:
    """Of one of the tables, made tiny.

    Args:
        name: Of a table above.
        changes: Values by dotted key below ``model``, as ``--cfg-options``
            takes them.
    """
    folder = os.path.join(os.path.dirname(mmdet.__file__), '.mim', 'configs')
    paths = {**OTHERS, **{key: value[1] for key, value in FAMILIES.items()},
             **{key: value[0] for key, value in REFUSED.items()}}
    cfg = Config.fromfile(os.path.join(folder, f'{paths[name]}.py'))
    _shrink(cfg.model)
    cfg.merge_from_dict({f'model.{key}': value
                         for key, value in (changes or {}).items()})
    return cfg


def build(name: str, changes: dict[str, Any] | None = None) -> nn.Module:
    """One of the tables, initialised from a fixed seed.

    Args:
        name: Of a table above.
        changes: As for :func:`config`.
    """
    return build_from(config(name, changes))


def build_from(cfg: Config) -> nn.Module:
    """The detector of a config, initialised from a fixed seed."""
    register_all_modules()
    for clock in ('iter', 'epoch'):
        MessageHub.get_current_instance().update_info(clock, 0)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()
    return model.train()


def batch_for(model: nn.Module, size: int = 128) -> dict[str, Any]:
    """Two images with boxes and what else a model learns, always the same.

    A teacher and its student get the second image, without its boxes.
    """
    parts = {name.rpartition('.')[2] for name, _ in model.named_modules()}
    np.random.seed(0)  # of the semantic map alone
    batch = demo_mm_inputs(
        2, (3, size, size), num_items=[3, 4], num_classes=80,
        with_mask=has_masks(model),
        with_semantic=bool({'semantic_head', 'panoptic_head'} & parts))
    return _branches(batch) if 'teacher' in parts else batch


def has_masks(model: nn.Module) -> bool:
    """Whether a model learns masks."""
    return any(name.endswith(('mask_head', 'panoptic_head'))
               for name, _ in model.named_modules())


def _branches(batch: dict[str, Any]) -> dict[str, Any]:
    """One image with annotations, the other one twice without."""
    sample = batch['data_samples'][1]
    sample.set_metainfo(dict(homography_matrix=np.eye(3, dtype=np.float32)))
    del sample.gt_instances, sample.ignored_instances
    out: dict[str, Any] = {}
    for key, (labelled, bare) in batch.items():
        out[key] = {'sup': [labelled, None],
                    'unsup_teacher': [None, copy.deepcopy(bare)],
                    'unsup_student': [None, copy.deepcopy(bare)]}
    return out


def samples_of(batch: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """Data samples with their place in the batch, of every branch."""
    samples = batch['data_samples']
    for branch in samples.values() if isinstance(samples, dict) else [samples]:
        for index, sample in enumerate(branch):
            if sample is not None:
                yield index, sample


def _dtypes(value: Any) -> Iterator[str]:
    """Dtypes of the floating tensors in nested containers."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield str(value.dtype)[len('torch.'):]
    elif isinstance(value, dict):
        yield from _dtypes(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _dtypes(item)


def _watched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Heads, stages of heads, and losses."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, last = name.rpartition('.')
        stage = parent.endswith('_head') and isinstance(
            modules[parent], nn.ModuleList)
        if last.endswith('_head') or last.startswith('loss_') or stage:
            yield name, module


Seen = Dict[str, Tuple[Set[str], Set[str]]]


def train(model: nn.Module, steps: int = 3, fp32: str | None = None
          ) -> tuple[list[dict[str, float]], Seen]:
    """Train in guarded emulated half.

    Args:
        model: A detector.
        steps: Training steps.
        fp32: Regions of full precision; None sees what stock would.

    Returns:
        The losses of each step, and by module the dtypes of its first input
        (features, predictions) and of the others (targets, weights).
    """
    seen: Seen = {}
    handles = []
    for name, module in _watched(model):

        def look(module: nn.Module, args: Any, kwargs: Any,
                 name: str = name) -> None:
            first, others = seen.setdefault(name, (set(), set()))
            values = [*args, *kwargs.values()]
            first.update(_dtypes(values[:1]))
            others.update(_dtypes(values[1:]))

        handles.append(module.register_forward_pre_hook(
            look, with_kwargs=True))
    wrapper = build_optim_wrapper(model, dict(
        type='NanSafeAmpOptimWrapper', loss_scale=64., nanfix=dict(fp32=fp32),
        optimizer=dict(type='SGD', lr=1e-4)))
    losses = []
    batch = batch_for(model)
    try:
        for _ in range(steps):
            logged = model.train_step(batch, wrapper)
            losses.append({key: float(value.detach())
                           for key, value in logged.items()})
    finally:
        for handle in handles:
            handle.remove()
    return losses, seen
