from __future__ import annotations

import json

import pytest
import torch

from mmdet_nanfix.diagnosis.findings import Failure
from mmdet_nanfix.diagnosis.replay.request import (
    ReplayRequest,
    can_replay,
    is_out_of_memory,
)


def test_this_torch_can():
    assert can_replay()


@pytest.mark.parametrize('error, is_so', [
    (torch.cuda.OutOfMemoryError('x'), True), (MemoryError(), True),
    (RuntimeError('CUDA error: out of memory'), True),
    (RuntimeError('x'), False), (ValueError(), False)])
def test_what_says_that_there_is_no_memory_left(error, is_so):
    assert is_out_of_memory(error) is is_so


def test_others_are_told_what_is_the_same_for_them():
    """Neither a batch nor origins, and all of it plain."""
    request = ReplayRequest(
        batch={'inputs': []}, probe=True, mended=frozenset([('log', 'a:1')]),
        until=Failure.GRADS, scale=2., precision=('heads', ),
        factors={'loss': .1}, gauge=True)
    shared = request.shared()
    assert json.loads(json.dumps(shared))['until'] == 'grads'
    other = ReplayRequest(**shared)
    assert other == ReplayRequest(
        until=Failure.GRADS, scale=2., precision=('heads', ),
        factors={'loss': .1}, gauge=True)
    assert other.shared() == shared
