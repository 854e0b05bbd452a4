"""Incidents to write, read and print."""
from __future__ import annotations

import math

from mmdet_nanfix.incidents import (
    Counts,
    HeadState,
    Incident,
    LossScaleChange,
    Where,
)


def incident(iteration=7, value=math.nan):
    return Incident(
        rank=0, epoch=2, iter=iteration,
        where=Where(phase='loss', head='roi_head.bbox_head', kind='nan'),
        heads={
            'backbone': HeadState(n_params=3),
            'rpn_head': HeadState(losses={'loss_rpn_cls': .5}, n_params=6),
            'roi_head.bbox_head': HeadState(
                losses={'loss_cls': value, 'loss_bbox': 1.},
                bad_losses=['loss_cls'],
                bad_grads=['roi_head.bbox_head.fc_cls.weight'], n_params=8),
        },
        loss_scale=LossScaleChange(512., 256.), action='skipped',
        counts=Counts(1, 3, 100))


def fail(message):
    raise AssertionError(message)
