from __future__ import annotations

import pytest
import torch

from mmdet_nanfix.diagnosis.replay.call_site import CallSite
from mmdet_nanfix.diagnosis.replay.op_record import (
    Record,
    bad_rows,
    module_of,
    span_of,
)


@pytest.mark.parametrize('index, span', [
    ((), (0, 96)), ((0, ), (0, 32)), ((2, ), (64, 96)),
    ((slice(None), 0), (0, 68)), ((1, slice(2, 4)), (40, 48))])
def test_where_in_its_memory_a_tensor_is(index, span):
    assert span_of(torch.zeros(3, 8)[index]) == span


def test_bad_rows():
    x = torch.ones(3, 2, 2)
    x[1, 0, 1] = float('nan')
    assert bad_rows(x) == ([1], 3)
    assert bad_rows(torch.ones(3)) == ([], 0)


def test_what_is_not_dispatched_is_named_by_its_module():
    site = CallSite('/x/site-packages/mmdet/models/a.py:3', 'assign')
    assert module_of(site) == 'mmdet.models.a.assign'


def test_an_origin_has_no_bad_parents_but_on_purpose():
    meant, bad = Record(1, 'full', CallSite(), meant=True), Record(2, 'log',
                                                             CallSite())
    assert Record(3, 'add', CallSite(), parents=[meant]).is_origin
    assert not Record(3, 'add', CallSite(), parents=[meant, bad]).is_origin
