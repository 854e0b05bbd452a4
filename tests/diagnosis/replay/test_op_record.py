from __future__ import annotations

import math

import pytest
import torch

from mmdet_nanfix.diagnosis.replay.op_record import (
    CallSite,
    OpRecord,
    bad_rows,
    describe,
    function_of,
    is_beyond,
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
    site = CallSite('/x/dist-packages/mmdet/models/a.py:3', 'assign',
                    'mmdet.models.a')
    assert function_of(site) == 'mmdet.models.a.assign'
    assert function_of(CallSite()) == '?.None'


def test_an_origin_has_no_bad_parents_but_on_purpose():
    meant = OpRecord(1, 'full', CallSite(), meant=True)
    bad = OpRecord(2, 'log', CallSite())
    assert OpRecord(3, 'add', CallSite(), parents=[meant]).is_origin
    assert not OpRecord(3, 'add', CallSite(), parents=[meant, bad]).is_origin


def test_a_description_counts_and_measures_what_is_finite():
    said = describe(torch.tensor([[1., -4.], [math.nan, -math.inf]]))
    assert said == {'shape': [2, 2], 'dtype': 'float32', 'amax': 4.,
                    'nan': 1, 'inf': 0, '-inf': 1}


@pytest.mark.parametrize('value, dtype, beyond', [
    (6e4, torch.float16, False), (-7e4, torch.float16, True),
    (7e4, torch.float32, False)])
def test_a_number_that_is_an_infinity_in_half(value, dtype, beyond):
    assert is_beyond(value, [torch.ones(1, dtype=dtype)]) is beyond
