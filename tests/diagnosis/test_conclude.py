from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.guards import parts_of
from torch import nn

from mmdet_nanfix.diagnosis.conclude import (
    Conclusion,
    origin_of,
    refine_where,
    where_raised,
)
from mmdet_nanfix.diagnosis.context import RunContext
from mmdet_nanfix.diagnosis.exceptions import ExceptionDetails
from mmdet_nanfix.diagnosis.findings import (
    Counterfactual,
    Experiment,
    Failure,
    Findings,
    ReplayStatus,
)
from mmdet_nanfix.diagnosis.parts import ModelParts
from mmdet_nanfix.diagnosis.replay.annotations import (
    AnnotationFault,
    BadAnnotation,
)
from mmdet_nanfix.diagnosis.replay.op_record import CallSite, OpRecord
from mmdet_nanfix.guard import (
    CaughtException,
    Evidence,
    Explanation,
    MicroStep,
    Remedy,
)
from mmdet_nanfix.incidents import Where


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
    found = Findings(failed=Failure(failed), origin=OpRecord(**record))
    return refine_where(coarse, found, PARTS, lambda weight: step)


def test_without_an_origin_the_first_look_stays():
    found = Findings(failed=Failure.LOSS)
    assert refine_where(COARSE, found, PARTS, lambda _: None) is COARSE


@pytest.mark.parametrize('failed, in_loss, phase', [
    ('loss', False, 'forward'), ('loss', True, 'loss'),
    ('raised', True, 'loss'), ('raised', False, 'forward'),
    ('grads', True, 'backward'), ('grads', False, 'backward')])
def test_phases(failed, in_loss, phase):
    where = place(failed, site=CallSite(
        'a.py:3', 'f', 'a', 'roi_head.bbox_head.1', in_loss, level=2),
        outputs=BAD)
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
    where = place(site=CallSite(
        'p.py:1', 'forward', module='data_preprocessor'))
    assert (where.phase, where.head, where.source) == (
        'input', None, 'p.py:1')


def test_statistics_keep_their_name():
    coarse = Where('buffers', 'backbone', 'backbone.running_var')
    where = place('buffers', coarse=coarse, site=CallSite(
        'r.py:1', 'forward', module='backbone'))
    assert (where.phase, where.module, where.source) == (
        'buffers', 'backbone.running_var', 'r.py:1')


def test_an_exception_without_an_origin():
    site = CallSite('a.py:3', 'assign', module='rpn_head', in_loss=True)
    where = where_raised(site, 'one_hot', PARTS)
    assert where == Where('loss', 'rpn_head', 'rpn_head', None, 'one_hot',
                          'a.py:3')
    assert where_raised(site, None, PARTS).op == 'assign'


def test_all_that_is_known_is_in_the_log():
    assert origin_of(Findings()) is None
    found = Findings(
        failed=Failure.GRADS,
        origin=OpRecord(1, 'log', CallSite('a.py:1'), outputs=BAD),
        others=[OpRecord(2, 'exp', CallSite('b.py:1'))], tests=['tried'],
        experiments={
            Counterfactual.FIRST: Experiment(False, 'it comes'),
            Counterfactual.BFLOAT16: Experiment(True, 'it does not come')})
    assert origin_of(found) == {
        'op': 'log', 'source': 'a.py:1', 'function': None, 'module': None,
        'given': None, 'in_backward': False, 'reached': 'gradients',
        'inputs': [], 'outputs': BAD, 'others': ['exp at b.py:1'],
        'tests': ['tried', 'bfloat16: it does not come']}


LABEL = BadAnnotation(0, 1, [1., 1., 5., 5.], 9, 'label 9', 'a.jpg', 7,
                      AnnotationFault.LABEL)
BOX = dataclasses.replace(LABEL, fault=AnnotationFault.ZERO_SIZE)


def drawn(found, caught=None, where=COARSE, model=None, **context):
    """The explanation of a failed step."""
    model = model or Detector()
    parts = ModelParts(model)
    shown = MicroStep(torch.tensor(1.), {}, caught)
    evidence = Evidence([shown], shown, where=where)
    told = Explanation(where, {})
    Conclusion(parts_of(model), parts).draw(
        told, evidence, found, RunContext(**context))
    return told


@pytest.mark.parametrize('bad, code', [
    ([LABEL], 'NF106'), ([BOX, LABEL], 'NF104'), ([], 'NF113')])
def test_what_an_exception_is_put_down_to(bad, code):
    """Its trial counts as an experiment: what is bad was repaired."""
    site = CallSite('a.py:3', 'assign', module='rpn_head', in_loss=True)
    told = drawn(Findings(failed=Failure.RAISED), CaughtException(
        'RuntimeError', 'RuntimeError: x', ExceptionDetails(
            'one_hot', site, bad)))
    assert told.cause.code == code
    assert told.where == Where('loss', 'rpn_head', 'rpn_head', None,
                               'one_hot', 'a.py:3')
    assert told.images == ([item.to_image() for item in bad] or None)
    assert told.cause.evidence == [
        'annotation repaired: the forward does not raise with what is bad '
        'repaired'] * bool(bad)


def test_annotations_that_a_search_has_blamed_come_first():
    found = Findings(failed=Failure.LOSS, experiments={
        Counterfactual.ANNOTATION_REPAIRED: Experiment(True, 'it is fine')})
    found.blame([LABEL])
    assert drawn(found).cause.code == 'NF106'
    found.blame([BOX])
    assert drawn(found).cause.code == 'NF104'
    # A whole image that is to blame is no label.
    details = ExceptionDetails(bad=[LABEL])
    found.images, found.blamed = [{'img_path': 'b.jpg', 'img_id': 1,
                                   'annotation': None}], []
    told = drawn(found, CaughtException('KeyError', 'KeyError', details))
    assert told.cause.code == 'NF104'
    assert told.images[0]['img_path'] == 'b.jpg'


def fitting():
    return Findings(
        failed=Failure.GRADS, fits=8., norm=1., experiments={
            Counterfactual.LOWER_SCALE: Experiment(True, 'it is fine')})


@pytest.mark.parametrize('can_retry, remedy', [
    (True, Remedy('retried', 8.)), (False, None)])
def test_a_remedy_where_the_step_can_be_made_again(can_retry, remedy):
    told = drawn(fitting(), half=True, scale=64., can_retry=can_retry,
                 sane=lambda norm: True)
    assert told.cause.code == 'NF101' and told.remedy == remedy


def test_what_began_in_another_process_has_no_cause_here():
    found = fitting()
    found.status = ReplayStatus.ELSEWHERE
    told = drawn(found, can_retry=True, sane=lambda norm: True)
    assert told.cause is None and told.remedy is None
    # Whatever is said of it.
    found.status, found.replay = ReplayStatus.REPRODUCED, (
        'it began on another rank')
    assert drawn(found).cause.code == 'NF101'


@pytest.mark.parametrize('early, phase, code', [
    (True, 'params', 'NF109'), (False, 'step', 'NF108')])
def test_weights_that_are_bad_need_no_replay(early, phase, code):
    model = Detector()
    parts = ModelParts(model)
    with torch.no_grad():
        model.rpn_head.bias.fill_(float('nan'))
    where = Where('params', 'rpn_head', 'rpn_head')
    told = Explanation(where, {})
    Conclusion(parts_of(model), ModelParts(model) if early else parts).draw(
        told, Evidence([], where=where), Findings(replay='too many'),
        RunContext())
    assert (told.where.phase, told.cause.code) == (phase, code)
    assert told.where.op == (None if early else 'SGD.step')
