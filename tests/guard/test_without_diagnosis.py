"""The guard is complete without a diagnosis."""
from __future__ import annotations

import math

import pytest
import torch
from helpers.guards import guard_of, run
from helpers.toy import toy_batch

from mmdet_nanfix.guard.without_diagnosis import NoDiagnosis


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def test_good_bad_bad_good_and_the_limit(toy):
    guard = guard_of(toy, diagnose=NoDiagnosis, max_consecutive=2)
    assert run(guard, toy_batch()).incident is None
    before = buffers(toy)
    loss = run(guard, toy_batch(box=math.nan)).incident
    # Skipped, and BatchNorm is as it was; the scale is not to blame.
    assert loss.action == 'skipped' and loss.cause is None
    assert all(torch.equal(before[name], value)
               for name, value in toy.named_buffers())
    assert loss.where.phase == 'loss' and loss.loss_scale.after == 256
    assert loss.replay == 'nothing was replayed'
    assert loss.heads['?'].bad_losses == ['loss_second']
    assert run(guard, toy_batch()).incident is None
    overflow = run(guard, toy_batch(box=1e37)).incident
    assert overflow.where.phase == 'backward'
    assert overflow.loss_scale.after == 128
    assert overflow.heads['roi_head'].bad_grads
    assert overflow.heads['rpn_head'].fine
    verdict = run(guard, toy_batch(box=1e37))
    assert verdict.incident.action == 'aborted'
    assert '2 optimizer steps in a row' in verdict.stop
    assert (guard.stop.total, guard.stop.steps) == (3, 5)


def test_an_exception_is_raised(toy):
    guard = guard_of(toy, diagnose=NoDiagnosis)
    with pytest.raises(KeyError), guard.capture():
        toy({})
    assert 'forward' not in toy.__dict__
