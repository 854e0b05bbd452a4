from __future__ import annotations

import pytest
import torch
from mmcv.cnn import build_conv_layer
from mmcv.ops import DeformConv2dPack, ModulatedDeformConv2dPack
from torch import nn

from mmdet_nanfix.hosts.mmengine.model_kinds import (
    has_compiled_parts,
    is_sharded,
    segfaults,
)


@pytest.mark.parametrize('layer, wanted', [
    (lambda: DeformConv2dPack(2, 2, 3), True),
    (lambda: ModulatedDeformConv2dPack(2, 2, 3), True),
    # Of DetectoRS: calls the function itself.
    (lambda: build_conv_layer(dict(type='SAC', use_deform=True), 2, 2, 3),
     True),
    (lambda: nn.Conv2d(2, 2, 3), False)])
def test_what_ends_the_process_with_a_nan(layer, wanted):
    assert segfaults(nn.Sequential(nn.Identity(), layer())) is wanted


def test_a_model_that_is_no_shard():
    assert not is_sharded(torch.nn.Linear(1, 1))


def test_a_part_that_was_compiled():
    plain = nn.Sequential(nn.Linear(1, 1))
    assert not has_compiled_parts(plain)
    assert has_compiled_parts(nn.Sequential(
        torch.compile(plain, backend='eager')))
