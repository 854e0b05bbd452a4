from __future__ import annotations

import pytest
from families import build

from mmdet_nanfix.diagnosis.cause.config_patch import (
    config_place,
    is_loss,
    weight_of,
)


def test_what_is_a_loss():
    model = build('htc')
    assert is_loss(model, 'rpn_head.loss_cls')
    assert is_loss(model, 'roi_head.semantic_head.criterion')
    assert not is_loss(model, 'rpn_head.rpn_conv')
    assert not is_loss(model, 'rpn_head.nothing')
    assert weight_of(model, 'rpn_head.loss_cls') == 1.
    assert weight_of(model, 'rpn_head.rpn_conv') is None
    assert weight_of(model, None) is None


def test_an_attribute_may_be_called_otherwise_than_its_argument():
    model = build('htc')
    place, besides = config_place(model, 'roi_head.semantic_head.criterion')
    assert place == 'roi_head.semantic_head.loss_seg' and besides == {}
    assert config_place(model, 'roi_head.bbox_head.1.loss_cls') is None
    # What no argument makes has no place.
    assert config_place(model, 'roi_head.semantic_head.conv_logits') is None


@pytest.mark.parametrize('given, kept', [
    (dict(rpn_head=dict(loss_cls=dict(type='X'))), set()),
    (dict(rpn_head=dict()), {'type', 'use_sigmoid', 'loss_weight'}),
    (None, set())])
def test_what_the_config_does_not_say_is_written_as_a_whole(given, kept):
    """A change alone would lose the type."""
    place, besides = config_place(
        build('faster_rcnn'), 'rpn_head.loss_cls', given)
    assert place == 'rpn_head.loss_cls' and set(besides) == kept


def test_a_student_is_the_detector_of_the_config():
    model = build('soft_teacher')
    assert config_place(model, 'student.rpn_head.loss_cls')[0] == (
        'detector.rpn_head.loss_cls')
