from __future__ import annotations

import pytest
import torch
from torch import nn

from mmdet_nanfix.diagnosis.exceptions import Raised
from mmdet_nanfix.diagnosis.first_look import (
    first_look,
    origin_of,
    refined,
    where_raised,
)
from mmdet_nanfix.diagnosis.parts import ModelParts
from mmdet_nanfix.diagnosis.replay.call_site import CallSite
from mmdet_nanfix.diagnosis.replay.op_record import Record
from mmdet_nanfix.diagnosis.replay.origin import Findings
from mmdet_nanfix.incidents.records import HeadState, Where


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
COARSE = Where(phase='loss', head='rpn_head')
BAD = [{'nan': 0, 'inf': 0, '-inf': 2}]


def place(failed='loss', step=None, coarse=COARSE, **record):
    record = {'index': 1, 'op': 'log', 'site': CallSite(), **record}
    return refined(coarse, Findings(failed, Record(**record)), PARTS,
                   lambda weight: step)


def test_without_an_origin_the_first_look_stays():
    assert refined(COARSE, Findings('loss'), PARTS, lambda _: None) is COARSE


@pytest.mark.parametrize('failed, in_loss, phase', [
    ('loss', False, 'forward'), ('loss', True, 'loss'),
    ('raised', True, 'loss'), ('raised', False, 'forward'),
    ('grads', True, 'backward'), ('grads', False, 'backward')])
def test_phases(failed, in_loss, phase):
    where = place(failed, site=CallSite(
        'a.py:3', 'f', 'roi_head.bbox_head.1', in_loss, level=2), outputs=BAD)
    assert where == Where(phase, 'roi_head.bbox_head.1',
                          'roi_head.bbox_head.1', 2, 'log', 'a.py:3', '-inf')


@pytest.mark.parametrize('kind, name, phase, head, module', [
    ('input', 'a.jpg', 'input', None, None),
    ('annotation', 'an annotation', 'input', None, None),
    ('weight', 'rpn_head.weight', 'params', 'rpn_head', 'rpn_head'),
    ('buffer', 'backbone.running_var', 'buffers', 'backbone',
     'backbone.running_var')])
def test_what_was_given(kind, name, phase, head, module):
    where = place(given=(kind, name), outputs=[{'nan': 1}])
    assert where == Where(phase, head, module, kind='nan')


def test_weights_that_the_optimizer_made_bad():
    where = place(given=('weight', 'rpn_head.weight'), step='Adam.step')
    assert (where.phase, where.op, where.head) == (
        'step', 'Adam.step', 'rpn_head')


def test_pixels_that_the_preprocessor_made_bad():
    where = place(site=CallSite('p.py:1', 'forward', 'data_preprocessor'))
    assert (where.phase, where.head, where.source) == (
        'input', None, 'p.py:1')


def test_statistics_keep_their_name():
    coarse = Where('buffers', 'backbone', 'backbone.running_var')
    where = place('buffers', coarse=coarse, site=CallSite(
        'r.py:1', 'forward', 'backbone'))
    assert (where.phase, where.module, where.source) == (
        'buffers', 'backbone.running_var', 'r.py:1')


def test_an_exception_without_an_origin():
    where = where_raised(Raised('E', 'one_hot', CallSite(
        'a.py:3', 'assign', 'rpn_head', True), []), PARTS)
    assert where == Where('loss', 'rpn_head', 'rpn_head', None, 'one_hot',
                          'a.py:3')


def test_the_first_look_at_shared_and_single_losses():
    fine, bad = HeadState({'loss': 1.}), HeadState(
        {'loss': float('nan')}, ['loss'])
    one = first_look(PARTS, {'a': fine, 'b': bad}, True, [], True)
    assert (one.phase, one.head, one.kind) == ('loss', 'b', 'nan')
    both = first_look(PARTS, {'a': bad, 'b': bad}, True, [], True)
    assert both.head is None
    elsewhere = first_look(PARTS, {'a': fine}, False, [], True)
    assert (elsewhere.phase, elsewhere.head) == ('loss', None)


def test_all_that_is_known_is_in_the_log():
    assert origin_of(Findings()) is None
    found = Findings('grads', Record(1, 'log', CallSite('a.py:1'), outputs=BAD),
                     [Record(2, 'exp', CallSite('b.py:1'))], tests=['tried'])
    assert origin_of(found) == {
        'op': 'log', 'source': 'a.py:1', 'function': None, 'module': None,
        'given': None, 'in_backward': False, 'reached': 'gradients',
        'inputs': [], 'outputs': BAD, 'others': ['exp at b.py:1'],
        'tests': ['tried']}


def test_losses_are_owned_where_they_were_computed():
    """A mask loss of weights that another head has predicted."""
    parts = ModelParts(Detector())
    loss = torch.ones(1, requires_grad=True).sum()
    assert 'rpn_head' not in parts.state({'loss_x': [loss]}, []) or (
        not parts.state({'loss_x': [loss]}, [])['rpn_head'].losses)
    parts.note_sites({'loss_x': [None, '', 'roi_head', 'rpn_head']})
    assert parts.state({'loss_x': [loss]}, [])['rpn_head'].losses
