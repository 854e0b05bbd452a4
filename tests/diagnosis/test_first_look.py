from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mmdet_nanfix.diagnosis.first_look import find_where, worst_of
from mmdet_nanfix.diagnosis.parts import ModelParts
from mmdet_nanfix.guard import CaughtException, MicroStep
from mmdet_nanfix.incidents import HeadState


class Detector(nn.Module):

    def __init__(self):
        super().__init__()
        self.data_preprocessor = nn.Module()
        self.backbone = nn.BatchNorm1d(2)
        self.rpn_head = nn.Linear(2, 2)
        self.roi_head = nn.Module()
        self.roi_head.bbox_head = nn.ModuleList([
            nn.Linear(2, 2), nn.Linear(2, 2)])


PARTS = ModelParts(Detector())


def test_the_first_look_at_shared_and_single_losses():
    fine, bad = HeadState({'loss': 1.}), HeadState(
        {'loss': float('nan')}, ['loss'])
    one = find_where(PARTS, {'a': fine, 'b': bad}, True, [], True)
    assert (one.phase, one.head, one.kind) == ('loss', 'b', 'nan')
    both = find_where(PARTS, {'a': bad, 'b': bad}, True, [], True)
    assert both.head is None
    elsewhere = find_where(PARTS, {'a': fine}, False, [], True)
    assert (elsewhere.phase, elsewhere.head) == ('loss', None)


@pytest.mark.parametrize('value, kind', [
    (math.nan, 'nan'), (math.inf, 'inf'), (-math.inf, '-inf'), (0., None)])
def test_the_kind_of_a_loss(value, kind):
    heads = {'a': HeadState({'loss': value}, ['loss'])}
    assert find_where(PARTS, heads, True, [], True).kind == kind


def test_weights_come_first_but_for_masks():
    model = Detector()
    with torch.no_grad():
        model.rpn_head.bias.fill_(-math.inf)
    model.rpn_head.requires_grad_(False)
    parts = ModelParts(model)
    assert find_where(parts, {}, True, [], True).phase == 'loss'
    with torch.no_grad():
        model.backbone.weight.fill_(math.nan)
    where = find_where(parts, {}, True, ['backbone.running_var'], True)
    assert (where.phase, where.head, where.module) == (
        'params', 'backbone', 'backbone')


def test_buffers_where_the_loss_is_fine():
    where = find_where(PARTS, {}, False, ['backbone.running_var'], True)
    assert (where.phase, where.head, where.module) == (
        'buffers', 'backbone', 'backbone.running_var')


def test_gradients_are_those_of_the_part_with_a_loss():
    heads = {'backbone': HeadState(bad_grads=['a', 'b'], n_params=2),
             'one': HeadState({'loss': 1.}, bad_grads=['c'], n_params=4),
             'two': HeadState({'loss': 1.}, bad_grads=['d'], n_params=2)}
    where = find_where(PARTS, heads, False, [], False)
    assert (where.phase, where.head) == ('backward', 'two')
    heads = {'backbone': HeadState(bad_grads=['a']),
             'neck': HeadState(bad_grads=['b'])}
    assert find_where(PARTS, heads, False, [], False).head == 'neck'
    assert find_where(PARTS, {}, False, [], False).head is None


def micro(value, caught=None):
    return MicroStep(torch.tensor(value), {}, caught)


def test_the_micro_step_to_show():
    fine, bad, last = micro(1.), micro(math.nan), micro(2.)
    raised = micro(math.nan, CaughtException('ValueError', 'no matching'))
    assert worst_of([]) == (None, False)
    for window, shown, is_bad in (
            ([fine, last], last, False), ([fine, bad, last], bad, True),
            ([bad, raised, last], raised, True)):
        found, loss_bad = worst_of(window)
        assert found is shown and loss_bad is is_bad
