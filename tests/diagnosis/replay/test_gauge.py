from __future__ import annotations

import pytest
import torch
from helpers.torch_features import needs_half
from torch.utils.checkpoint import checkpoint

from mmdet_nanfix.diagnosis.replay.gauge import FillGauge


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_the_largest_gradient_as_a_share_of_the_range(dtype):
    largest = torch.finfo(dtype).max
    x = torch.ones(3, requires_grad=True)
    with FillGauge() as gauge:
        # The middle one is the largest on the way.
        (x.to(dtype) * .25).sum().backward(torch.tensor(
            largest / 2, dtype=dtype))
    assert gauge.filled == pytest.approx(.5, rel=1e-2)


def test_nothing_in_half_fills_nothing():
    x = torch.ones(3, requires_grad=True)
    with FillGauge() as gauge:
        (x * 1e30).sum().backward()
    assert gauge.filled == 0.


def test_an_infinity_is_more_than_all():
    x = torch.ones(3, requires_grad=True)
    with FillGauge() as gauge:
        (x.half() * 4).sum().backward(torch.tensor(6e4).half())
    assert gauge.filled == float('inf')


@needs_half
@pytest.mark.parametrize('reentrant', [False, True])
def test_what_is_computed_again_is_no_gradient(reentrant):
    x = torch.ones(3, requires_grad=True)

    def layer(y):
        return (y.half() * 6e4).float() * 1e-5

    loss = checkpoint(layer, x, use_reentrant=reentrant).sum()
    with FillGauge() as gauge:
        loss.backward()
    assert 0 < gauge.filled < .1
