from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from helpers.torch_features import needs_half

from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.fp32.cast import (
    WideSigmoid,
    in_fp32,
    widened,
    without_autocast,
)

HALF = torch.float16
Pair = collections.namedtuple('Pair', 'left right')


def test_half_tensors_of_any_depth():
    half, wide = torch.ones(2).half(), torch.ones(2)
    value = {'a': [half, (wide, half.bfloat16())], 'b': Pair(half, 'text'),
             'c': torch.ones(1, dtype=torch.long), 'd': None}
    out = widened(value)
    assert out['a'][0].dtype == out['a'][1][1].dtype == torch.float32
    assert out['a'][1][0] is wide and out['c'] is value['c']
    assert isinstance(out['b'], Pair) and out['b'].left.dtype == (
        torch.float32)
    assert value['a'][0] is half


@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_autocast_is_off(device):
    x = torch.ones(2, 2)
    with cuda_autocast():
        with without_autocast(device):
            assert F.linear(x, x).dtype == torch.float32
        assert F.linear(x, x).dtype == HALF


def test_a_function_in_fp32():
    x = torch.full((2, ), 300., dtype=HALF, requires_grad=True)
    with cuda_autocast():
        assert torch.isinf(x * x).all()
        out = in_fp32(lambda value, *, other: value * other[0], x,
                      other=[x])
        assert F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == HALF
    assert out.dtype == torch.float32 and out.tolist() == [90000., 90000.]
    out.sum().backward()
    assert x.grad.dtype == HALF and x.grad.tolist() == [600., 600.]


def test_the_banned_operation_runs():
    x = torch.tensor([.5]).half()
    with cuda_autocast():
        with pytest.raises(RuntimeError, match='binary_cross_entropy'):
            F.binary_cross_entropy(x, x)
        assert in_fp32(F.binary_cross_entropy, x, x).isfinite()


def test_what_comes_twice_is_cast_once():
    half = torch.ones(2).half()
    left, right = widened((half, {'same': half}))
    assert left is right['same']


def test_objects_that_refer_to_each_other():

    class Node:
        pass

    nodes = [Node() for _ in range(100)]
    for node in nodes:
        node.others, node.value = nodes, torch.ones(1)
    assert widened(nodes) is nodes
    infos = [{'id': index} for index in range(100000)]
    assert widened([infos])[0] is infos


class Sigmoids:

    def own(self, x):
        return [x.sigmoid(), torch.sigmoid(x), F.sigmoid(x),
                *[item.sigmoid() for item in (x, )]]

    def below(self, x):
        return torch.nn.Sigmoid()(x)

    def into(self, x, out):
        return torch.sigmoid(x, out=out)


@needs_half
def test_sigmoids_of_some_code():
    x = torch.full((1, ), 12.).half()
    codes = {Sigmoids.own.__code__, Sigmoids.into.__code__, *(
        code for code in Sigmoids.own.__code__.co_consts
        if hasattr(code, 'co_name'))}
    with WideSigmoid(codes):
        assert all(score.dtype == torch.float32 and score < 1
                   for score in Sigmoids().own(x))
        assert Sigmoids().below(x).dtype == HALF
        out = torch.zeros(1).half()
        assert Sigmoids().into(x, out) is out and out == 1
    assert Sigmoids().own(x)[0].dtype == HALF
