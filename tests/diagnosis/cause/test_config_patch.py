from __future__ import annotations

import math

import pytest
from families import build

from mmdet_nanfix.diagnosis.cause.config_patch import (
    as_config,
    config_place,
    is_loss,
    model_patch,
    optim_wrapper,
    rounded_down,
    to_hook,
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


def test_values_are_python():
    text = as_config(dict(a=dict(b=[1., 'x'], c=None), d={'e-f': 1}))
    assert text == "a = dict(b=[1.0, 'x'], c=None)\nd = {'e-f': 1}"
    assert as_config(dict(a="it's")) == 'a = "it\'s"'


def test_a_patch_stands_where_the_module_does():
    assert model_patch(None, loss_weight=1.) == {}
    patch = model_patch(('roi_head.loss', {'type': 'X'}), loss_weight=1.)
    assert as_config(patch) == (
        "model = dict(roi_head=dict(loss=dict(type='X', loss_weight=1.0)))")


def test_settings_go_where_the_hook_has_them():
    changes = optim_wrapper(nanfix={'fp32': 'losses'}, dtype='bfloat16')
    assert to_hook(changes) == {
        'optim_wrapper': {'dtype': 'bfloat16'},
        'default_hooks': {'nanfix': {'type': 'NanGuardHook',
                                     'fp32': 'losses'}}}
    other = optim_wrapper(dtype='bfloat16')
    assert to_hook(other) == other and to_hook({}) == {}


@pytest.mark.parametrize('value, down', [
    (123., 100.), (3.4, 2.), (.009, .005), (5., 5.), (1., 1.), (0., 0.),
    (-3., -3.), (math.inf, math.inf)])
def test_a_bound_is_a_round_number(value, down):
    assert rounded_down(value) == down
