from __future__ import annotations

import collections

import torch

from mmdet_nanfix.torch_support.walking import map_tensors, tensors

Pair = collections.namedtuple('Pair', 'left right')


class Own(dict):
    pass


ONE, TWO = torch.ones(1), torch.full((1, ), 2.)


def test_tensors_in_containers_of_any_depth():
    value = [ONE, {'a': (TWO, 'text'), 'b': Own(c=Pair(ONE, None))}, 3]
    assert [float(tensor) for tensor in tensors(value)] == [1, 2, 1]
    assert list(tensors(ONE)) == [ONE] and list(tensors('text')) == []


def test_the_containers_stay_what_they_are():
    value = [ONE, {'a': (TWO, 'text'), 'b': Own(c=Pair(ONE, None))}, 3]
    out = map_tensors(lambda tensor: float(tensor) * 2, value)
    assert out == [2, {'a': (4, 'text'), 'b': Own(c=Pair(2, None))}, 3]
    assert isinstance(out[1]['b'], Own)
    assert isinstance(out[1]['b']['c'], Pair) and value[0] is ONE
    assert map_tensors(float, torch.max(torch.ones(2, 2), 0)[0][:1]) == 1
