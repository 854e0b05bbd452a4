from __future__ import annotations

import itertools

import pytest

from mmdet_nanfix.diagnosis.findings import (
    Counterfactual,
    Experiment,
    Failure,
    Findings,
    ReplayResult,
)
from mmdet_nanfix.diagnosis.replay.annotations import BadAnnotation
from mmdet_nanfix.diagnosis.replay.op_record import CallSite, OpRecord


def test_a_replay_is_past_what_is_looked_at_before():
    order = [*Failure, None]
    for first, other in itertools.product(Failure, order):
        assert ReplayResult(other).is_past(ReplayResult(first)) is (
            order.index(other) > order.index(first))
    assert not ReplayResult(error='ran out of memory').is_past(
        ReplayResult(Failure.LOSS))


def test_names_are_those_of_the_log():
    """Evidence begins with them, in logs that were written before."""
    assert [item.value for item in Failure] == [
        'raised', 'loss', 'grads', 'buffers']
    assert Counterfactual.of_mode('losses').value == 'losses in fp32'
    assert Counterfactual.of_mode('heads').value == 'heads in fp32'


def origin(**settings):
    return OpRecord(0, 'log', CallSite(), **settings)


@pytest.mark.parametrize('result, first, cured, words', [
    (ReplayResult(), None, True, 'with nothing changed it does not come'),
    (ReplayResult(Failure.LOSS), None, False, 'with nothing changed it comes'),
    (ReplayResult(Failure.LOSS), origin(), False,
     'with nothing changed it comes; it begins at log'),
    (ReplayResult(Failure.LOSS), origin(given=('weight', 'a.bias')), False,
     'with nothing changed it comes; it goes back to the weight a.bias'),
    (ReplayResult(Failure.RAISED, raised='ValueError'), origin(), False,
     'with nothing changed it comes, as ValueError; it begins at log')])
def test_the_first_replay_in_words(result, first, cured, words):
    found = Findings(result=result, origin=first)
    found.note_first()
    assert found.experiments == {
        Counterfactual.FIRST: Experiment(cured, words)}


@pytest.mark.parametrize('result', [None, ReplayResult(error='raised X')])
def test_without_a_result_nothing_was_shown(result):
    found = Findings(result=result)
    found.note_first()
    assert not found.experiments


def test_what_was_tried_and_has_helped():
    found = Findings(experiments={
        Counterfactual.PART_FP32: Experiment(True, ''),
        Counterfactual.ALL_FP32: Experiment(False, '')})
    assert found.cured(Counterfactual.PART_FP32)
    assert found.cured(*Counterfactual)
    assert not found.cured(Counterfactual.ALL_FP32, Counterfactual.BFLOAT16)
    assert not found.cured()


def test_annotations_are_blamed_with_their_images():
    found = Findings()
    fault = BadAnnotation(0, 1, [0., 0., 0., 4.], 2, 'zero', 'a.jpg', 7)
    found.blame([fault])
    assert found.blamed == [fault] and found.images == [fault.to_image()]
    found.blame([])
    assert found.images is None
