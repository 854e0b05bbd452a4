from __future__ import annotations

import pytest
import torch

from mmdet_nanfix.hosts.mmengine.settings import (
    Settings,
    checked_dtype,
    device_of,
    split_settings,
)


@pytest.mark.parametrize('given, dtype', [
    (None, torch.float16), ('bfloat16', torch.bfloat16),
    (torch.float32, torch.float32), ('float64', torch.float64)])
def test_dtypes(given, dtype):
    assert checked_dtype(given) is dtype


@pytest.mark.parametrize('given, error', [
    ('half', ValueError), (torch.int8, ValueError), (16, TypeError)])
def test_impossible_dtypes(given, error):
    with pytest.raises(error, match='`dtype`'):
        checked_dtype(given)


def test_settings_are_split():
    assert split_settings(None) == Settings({}, {}, 'heads')
    assert split_settings(dict(
        max_consecutive=3, init_scale=8., fp32=None)) == Settings(
            dict(init_scale=8.), dict(max_consecutive=3), None)
    with pytest.raises(TypeError, match=(
            'fp32, fp32_modules, init_scale')):
        split_settings(dict(max_consecutiv=3))
    with pytest.raises(TypeError, match='a dict'):
        split_settings(3)


@pytest.mark.parametrize('value', ['head', True, 'None', ['heads']])
def test_impossible_regions(value):
    with pytest.raises(ValueError, match="'heads', 'losses', None"):
        split_settings(dict(fp32=value))


def test_the_device_is_that_of_the_parameters():
    weight = torch.nn.Parameter(torch.ones(1, device='meta'))
    assert device_of(torch.optim.SGD([weight], .1)) == 'meta'
    assert device_of(None) == 'cpu'
