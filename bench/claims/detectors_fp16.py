"""DetectoRS with ``fp16 = dict(loss_scale=512.)``, as users had it.

``python bench/claims/detectors_fp16.py`` trains MMDetection's own
``detectors_cascade-rcnn_r50_1x_coco``, narrower, in emulated half precision:
three steps with stock's fixed scale, and three guarded ones that start at the
same scale. It prints what became of them and the report of the incident.

The backbones load a checkpoint as the config says, frozen BatchNorm
included; it is a random one, made here. Its statistics are those of
normalised pixels, and the pixels come with a standard deviation of 1, as when
the preprocessor of a ``-caffe`` config meets weights of torchvision: features
are some hundred times larger than they should be. With the right
normalization this tiny model trains at 512.
"""
from __future__ import annotations

import copy
import os
import sys
import tempfile
import warnings
from typing import Any

import mmdet
import torch
from mmdet.models.backbones import ResNet
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from torch import nn

from mmdet_nanfix.incidents import IncidentText, read_log

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))), 'lib'))

import families
from stock import stock_on_cpu

__all__ = ['build', 'guarded', 'stock']

_BASE, _NECK, _HIDDEN = 8, 64, 256
_SCALE = 512.


def _checkpoint(path: str) -> None:
    """Weights of a narrow ResNet-50 whose statistics fit unit noise."""
    torch.manual_seed(0)
    net = ResNet(50, base_channels=_BASE, stem_channels=_BASE,
                 norm_eval=False)
    net.init_cfg = None
    net.init_weights()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode='fan_out',
                                    nonlinearity='relu')
        if isinstance(module, nn.BatchNorm2d):
            # Statistics of one batch, not an average over many.
            module.momentum = None
    net.train()
    with torch.no_grad():
        net(torch.randn(4, 3, 128, 128))
    torch.save(net.state_dict(), path)


def _config(checkpoint: str) -> Config:
    cfg = Config.fromfile(os.path.join(
        os.path.dirname(mmdet.__file__), '.mim', 'configs', 'detectors',
        'detectors_cascade-rcnn_r50_1x_coco.py'))
    values: dict[str, Any] = {
        'backbone.init_cfg.checkpoint': checkpoint,
        'backbone.base_channels': _BASE, 'backbone.stem_channels': _BASE,
        'neck.rfp_backbone.pretrained': checkpoint,
        'neck.rfp_backbone.base_channels': _BASE,
        'neck.rfp_backbone.stem_channels': _BASE,
        'neck.rfp_backbone.rfp_inplanes': _NECK,
        'neck.in_channels': [_BASE * 4 * 2**level for level in range(4)],
        'neck.out_channels': _NECK, 'neck.aspp_out_channels': _NECK // 4,
        'rpn_head.in_channels': _NECK, 'rpn_head.feat_channels': _NECK,
        'roi_head.bbox_roi_extractor.out_channels': _NECK,
        'data_preprocessor.std': [1., 1., 1.],
    }
    for stage in range(3):
        values[f'roi_head.bbox_head.{stage}.in_channels'] = _NECK
        values[f'roi_head.bbox_head.{stage}.fc_out_channels'] = _HIDDEN
    cfg.merge_from_dict({f'model.{key}': value
                         for key, value in values.items()})
    return cfg


def build() -> nn.Module:
    """The detector."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'resnet.pth')
        _checkpoint(path)
        return families.build_from(_config(path))


def _train(model: nn.Module, wrapper: dict[str, Any], steps: int
           ) -> tuple[int, float]:
    """Optimizer steps that were made, and the loss scale at the end."""
    model = copy.deepcopy(model)
    built = build_optim_wrapper(model, dict(
        optimizer=dict(type='SGD', lr=1e-5), **wrapper))
    batch = families.batch_for(model)
    made = 0
    torch.manual_seed(3)
    for _ in range(steps):
        before = [weight.detach().clone() for weight in model.parameters()]
        model.train_step(copy.deepcopy(batch), built)
        made += any(not torch.equal(*pair) for pair in zip(
            before, model.parameters()))
    return made, built.loss_scaler.get_scale()


def stock(model: nn.Module, steps: int = 3) -> tuple[int, float]:
    """Train with stock's wrapper at the fixed scale.

    Returns:
        Optimizer steps that were made, and the loss scale at the end.
    """
    with stock_on_cpu():
        return _train(model, dict(type='AmpOptimWrapper',
                                  loss_scale=_SCALE), steps)


def guarded(model: nn.Module, steps: int = 3
            ) -> tuple[int, float, list[dict[str, Any]]]:
    """The same, guarded, from the same scale.

    Returns:
        Likewise, and the incidents.
    """
    with tempfile.TemporaryDirectory() as folder:
        logger = MMLogger.get_instance(
            os.path.basename(folder), log_level='ERROR',
            log_file=os.path.join(folder, 'run.log'))
        try:
            made, scale = _train(model, dict(
                type='NanSafeAmpOptimWrapper', loss_scale=dict(
                    init_scale=_SCALE, allow_high_start=True)), steps)
        finally:
            for handler in list(logger.handlers):
                if hasattr(handler, 'baseFilename'):
                    handler.close()
                    logger.removeHandler(handler)
        log = os.path.join(folder, 'nanfix', 'incidents.jsonl')
        return made, scale, list(read_log(log)) if os.path.exists(log) else []


def main() -> None:
    """Train both ways and tell."""
    MMLogger.get_current_instance().setLevel('ERROR')
    warnings.simplefilter('ignore')
    model = build()
    made, scale = stock(model)
    print(f'stock, loss_scale={_SCALE:g}: {made} of 3 steps made, loss scale '
          f'{scale:g} at the end')
    made, scale, incidents = guarded(model)
    print(f'guarded, from {_SCALE:g}: {made} of 3 steps made, loss scale '
          f'{scale:g} at the end')
    for incident in incidents:
        print(f'\n{IncidentText(incident).paragraph()}')


if __name__ == '__main__':
    main()
