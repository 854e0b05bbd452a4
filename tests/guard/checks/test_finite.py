from __future__ import annotations

import math

import measuring
import pytest
import torch
from torch import nn

from mmdet_nanfix.guard.checks.finite import (
    bad_tensors,
    by_kind,
    can_be_checked,
    flag_of,
    is_finite,
)

BAD = [math.nan, math.inf, -math.inf]
























def test_bad_tensors():
    tensors = [
        torch.ones(2, 2), None, torch.tensor([1., math.nan]),
        torch.empty(0), torch.tensor([1, 2]), torch.tensor(-math.inf),
        torch.full((4, ), 65504., dtype=torch.float16),
        torch.full((3, ), 3e38), torch.tensor([math.inf]).half(),
        torch.tensor([1e300], dtype=torch.float64),
    ]
    assert bad_tensors(tensors) == [2, 5, 8]
    assert bad_tensors([]) == [] and bad_tensors([None]) == []






@pytest.mark.parametrize('tensors, bad', [
    ([torch.ones(2), torch.zeros(3).half()], False),
    ([torch.ones(2), torch.tensor([math.inf])], True),
    ([torch.tensor([3e38, 3e38])], False),
    ([torch.tensor([math.nan]).bfloat16(), torch.ones(1).double()], True)])
def test_flag(tensors, bad):
    flag = flag_of(by_kind(tensors), torch.device('cpu'))
    assert bool(flag.isnan()) is bad and (bad or flag == 0)


def test_what_cannot_be_checked():
    assert flag_of([], torch.device('cpu')) is None
    assert can_be_checked(torch.ones(1))
    for tensor in (torch.ones(1, dtype=torch.long), torch.empty(0),
                   torch.ones(1, device='meta'),
                   # Torch 2.0 has no floats of 8 bits.
                   torch.ones(1).to(getattr(torch, 'float8_e5m2',
                                            torch.int8)),
                   nn.LazyBatchNorm1d().running_mean,
                   torch.ones(1).to_sparse()):
        assert not can_be_checked(tensor)


def test_bad_tensors_are_found_in_one_go():
    """On a GPU each transfer of one number would be a read."""
    from measuring import Calls
    counts = []
    for number in (2, 50):
        with Calls() as calls:
            bad_tensors([torch.ones(3)] * number)
        assert not {'_to_copy', 'item'} & set(calls.by_name)
        counts.append(calls.total - calls.by_name['detach'])
    assert counts[0] == counts[1]


@pytest.mark.parametrize('dtype', [
    torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize('bad', [None, *BAD])
def test_one_tensor_is_looked_at(dtype, bad):
    values = torch.linspace(-3, 2, 40).to(dtype)
    if bad is not None:
        values[7] = bad
    for tensor in (values, values.view(5, 8).t(), values.requires_grad_()):
        assert is_finite(tensor) is (bad is None)
    assert is_finite(torch.tensor(3, dtype=dtype))


@pytest.mark.parametrize('value', [1., math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize('dtype', [
    torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_one_read_tells_if_all_is_finite(value, dtype):
    x = torch.zeros(3, dtype=torch.float32)
    x[1] = value
    x = x.to(dtype)
    with measuring.Calls() as calls:
        found = is_finite(x)
    assert found is bool(torch.isfinite(x).all())
    assert calls.reads == 1
