from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.fp32.modules import install_module, switched
from mmdet_nanfix.torch_support.patching import replaced


class Neck(nn.Module):
    """Writes into what it is given, as some do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, feats, extra=None):
        feats[0] = self.linear(feats[0])
        feats.append(feats[0] + 1)
        if extra is not None:
            extra['seen'] = feats[0]
        return feats


class Base(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.run(x)

    def run(self, x):
        return self.linear(x)

    @property
    def width(self):
        return 2

    @staticmethod
    def double(x):
        return x * 2

    @classmethod
    def name(cls):
        return cls.__name__


class Derived(Base):

    def run(self, x):
        return super().run(x) + nn.functional.linear(x, x)


def in_part(part, function):
    with cuda_autocast(), switched(None, 'cpu', [install_module(part)]):
        return function()


def test_what_it_writes_into_arguments_is_seen():
    neck = Neck()
    feats = [torch.ones(2, 2).half(), torch.zeros(2).half()]
    extra = {'half': torch.ones(1).half()}
    kept = feats[1]
    in_part(neck, lambda: neck(feats, extra))
    assert len(feats) == 3 and extra['seen'] is feats[0]
    assert feats[0].dtype == feats[2].dtype == torch.float32
    # What it has not touched is what it was.
    assert feats[1] is kept and extra['half'].dtype == torch.float16


class Mover(nn.Module):

    def forward(self, feats, named, nested):
        feats.insert(0, feats.pop() * 2)
        del named['gone']
        nested[0].append(feats[0])


def test_what_moves_and_what_goes():
    mover = Mover()
    first, second = torch.ones(2).half(), torch.ones(2).half()
    feats, named = [first, second], {'gone': first, 'kept': second}
    nested = ([first], 1)
    in_part(mover, lambda: mover(feats, named, nested))
    assert feats[1] is first and feats[0].dtype == torch.float32
    assert named == {'kept': second} and nested[0] == [first, feats[0]]


class Chain(nn.Sequential):
    """Its forward is torch's."""


def test_a_class_with_a_forward_of_torch():
    chain, other = Chain(nn.Linear(2, 2)), Chain(nn.Linear(2, 2))
    x = torch.ones(2, 2)
    assert in_part(chain, lambda: chain(x)).dtype == torch.float32
    assert in_part(chain, lambda: other(x)).dtype == torch.float16


@pytest.mark.parametrize('make', [Derived, lambda: nn.Linear(2, 2)])
def test_a_compiled_model(make):
    part = make()
    compiled = torch.compile(lambda x: part(x) + 1, backend='eager')
    x = torch.ones(2, 2)
    for _ in range(2):
        assert in_part(part, lambda: compiled(x)).dtype == torch.float32
        with cuda_autocast():
            assert compiled(x).dtype == torch.float16


def test_methods_of_any_kind_are_what_they_were():
    part, other = Derived(), Derived()
    x = torch.ones(2, 2)
    assert in_part(part, lambda: part(x)).dtype == torch.float32
    # Another one of the same class is not meant.
    assert in_part(part, lambda: other(x)).dtype == torch.float16
    assert in_part(part, lambda: part.run(x)).dtype == torch.float32
    assert in_part(part, lambda: (part.width, part.double(2),
                                  part.name())) == (2, 4, 'Derived')
    with cuda_autocast():
        assert part(x).dtype == torch.float16
    for again in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert torch.equal(again.linear.weight, part.linear.weight)
        assert in_part(part, lambda again=again: again(x)).dtype == (
            torch.float16)


@pytest.mark.parametrize('reentrant', [False, True])
def test_a_checkpointed_part_is_computed_again_in_fp32(reentrant):
    part = Base()
    with torch.no_grad():
        part.linear.weight.fill_(1e5)
    x = torch.ones(2, 2, requires_grad=True)
    parts = [install_module(part)]
    with cuda_autocast(), switched(None, 'cpu', parts):
        out = checkpoint(part, x, use_reentrant=reentrant)
    with switched(None, 'cpu', parts):
        out.sum().backward()
    assert out.dtype == torch.float32
    assert torch.isfinite(part.linear.weight.grad).all()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize('make', [
    lambda layer: layer, lambda layer: nn.Sequential(layer),
    lambda layer: nn.ModuleList([layer]),
    lambda layer: nn.ModuleDict({'a': nn.ModuleList([layer])})])
def test_layers_of_torch_and_containers_of_them(make):
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    part = make(layer)
    x = torch.ones(2, 2)
    call = part if isinstance(part, nn.Sequential) else layer
    assert in_part(part, lambda: call(x)).dtype == torch.float32
    assert in_part(part, lambda: other(x)).dtype == torch.float16
    # Torch's classes are everybody's.
    assert 'forward' not in vars(layer)
    assert not hasattr(nn.Linear.forward, '__wrapped__')
    torch.jit.script(nn.Linear(2, 2))


def test_a_bound_method_of_a_wrapped_class_is_compiled():
    part = Derived()
    install_module(part)
    x = torch.ones(2, 2)
    out = torch.compile(part.forward, backend='eager')(x)
    assert torch.equal(out, part(x))


def test_what_is_replaced_is_listed_and_put_back():
    layer = nn.Linear(2, 2)
    part = install_module(nn.ModuleList([layer]))

    def listed():
        return [(what.owner, what.name) for what in replaced()
                if what.place is layer]

    for _ in range(2):
        with switched(None, 'cpu', [part]):
            assert listed() == [('fp32 modules', 'forward')]
            with switched(None, 'cpu', [part]):
                assert listed() == [('fp32 modules', 'forward')]
        assert listed() == [] and 'forward' not in vars(layer)
