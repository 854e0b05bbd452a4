from __future__ import annotations

import functools

import torch

from mmdet_nanfix.torch_support import features
from mmdet_nanfix.torch_support.features import (
    not_compiled,
    tree_leaves,
)


def test_leaves():
    one, two = torch.ones(1), torch.ones(2)
    assert tree_leaves([one, (two, {'a': one, 'b': 'text'}), 3]) == [
        one, two, one, 'text', 3]


def test_a_function_is_kept_from_being_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @not_compiled
    def inner(x):
        return x * 2

    torch.compile(lambda x: inner(x + 1) + 3, backend=backend)(torch.ones(1))
    operations = [str(node.target) for graph in graphs
                  for node in graph.graph.nodes]
    assert any('add' in name for name in operations)
    assert not any('mul' in name for name in operations)


def test_a_wrapper_of_a_function_that_is_not_compiled_is_kept():

    @not_compiled
    def inner(x):
        return x + 1

    @not_compiled
    @functools.wraps(inner)
    def outer(x):
        return inner(x) * 10

    assert outer(1) == 20 and inner(1) == 2


def test_what_a_version_offers():
    version = tuple(map(int, torch.__version__.split('.')[:2]))
    assert (version >= (2, 4)) == features.AUTOCAST_BY_DEVICE
    assert (version >= (2, 3)) == features.HAS_CPU_SCALER
