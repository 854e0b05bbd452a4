from __future__ import annotations

import inspect
import sys
import threading
import weakref

import pytest
import torch
from mmdet.models.losses import FocalLoss
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmdet_nanfix.diagnosis.replay.call_site import (
    CallSites,
    NodeSites,
    is_library,
)
from mmdet_nanfix.diagnosis.replay.op_record import CallSite
from mmdet_nanfix.fp32 import PrecisionControl
from mmdet_nanfix.torch_support import HAS_SEQUENCE_NR


def multi_apply(func, *args, **kwargs):
    return [func(*items, **kwargs) for items in zip(*args)]


class ToyLoss(nn.Module):

    def forward(self, x, look):
        return look()


class Assigner:

    def assign(self, look):
        return look()


class Head(nn.Module):
    """A head that MMDetection would call as plain methods."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.loss_cls = ToyLoss()
        self.assigner = Assigner()

    def forward_single(self, x, look):
        return look()

    def loss_by_feat(self, look):
        return look()

    def loss_by_feat_single(self, score, anchors, look):
        score = score.flatten()
        return look()

    def get_targets_single(self, boxes, sample, look):
        return look()

    def loss_of_module(self, look):
        return self.loss_cls(torch.ones(1), look)

    def targets(self, look):
        return self.assigner.assign(look)


class Model(nn.Module):

    def __init__(self):
        super().__init__()
        self.bbox_head = Head()


def site_of(call):
    model = Model()
    sites = CallSites(model)
    seen = []
    call(model.bbox_head, lambda: seen.append(sites.here()))
    return seen


def test_a_plain_method_is_its_heads():
    (site, ) = site_of(lambda head, look: head.forward_single(None, look))
    assert site.module == 'bbox_head' and not site.in_loss
    path, _, line = site.source.rpartition(':')
    assert site.file_module == __name__
    assert path == __file__ and 'lambda' in inspect.getsource(
        inspect.getmodule(site_of)).splitlines()[int(line) - 1]


def test_losses_targets_and_loss_modules_are_told_from_layers():
    for call, module in (
            (lambda head, look: head.loss_by_feat(look), 'bbox_head'),
            (lambda head, look: head.loss_of_module(look),
             'bbox_head.loss_cls'),
            (lambda head, look: head.targets(look), 'bbox_head')):
        (site, ) = site_of(call)
        assert site.in_loss and site.module == module


def test_levels_and_images_of_a_loop():
    maps = [torch.ones(2, 1, 4, 4), torch.ones(2, 1, 2, 2)]
    anchors = [torch.ones(3), torch.ones(3)]
    levels = site_of(lambda head, look: multi_apply(
        head.loss_by_feat_single, maps, anchors, look=look))
    # The map was bound to another name within; the anchors were not.
    assert [site.level for site in levels] == [0, 1]
    assert all(site.image is None for site in levels)
    images = site_of(lambda head, look: multi_apply(
        head.get_targets_single, [torch.ones(5, 4), torch.ones(6, 4)],
        [object(), object()], look=look))
    assert [site.image for site in images] == [0, 1]
    assert all(site.level is None for site in images)


def test_what_is_the_same_for_all_says_nothing():
    same = torch.ones(2, 1, 4, 4)
    levels = site_of(lambda head, look: multi_apply(
        head.forward_single, [same, same], look=look))
    assert [site.level for site in levels] == [None, None]


def test_an_operation_within_torch_has_the_line_of_its_caller():
    model = Model()
    sites = CallSites(model)
    seen = []
    model.bbox_head.conv.register_forward_hook(
        lambda *_: seen.append(sites.here()))
    model.bbox_head.conv(torch.ones(1, 1, 1, 1))
    assert seen[0].source.startswith(__file__)


def test_an_exception_has_a_place():
    model = Model()

    def fail():
        raise ValueError

    try:
        model.bbox_head.targets(fail)
    except ValueError as error:
        site = CallSites(model).of_error(error)
    assert site.module == 'bbox_head' and site.in_loss
    assert site.function == 'fail'


def frame_in(module):
    """A frame of a function of a Python module."""
    names = {'__name__': module, 'sys': sys}
    exec('def here():\n    return sys._getframe()', names)
    return names['here']()


@pytest.mark.parametrize('module, library', [
    ('torch', True), ('torch.nn.modules.linear', True), ('numpy', True),
    ('scipy.optimize', True), ('mmdet_nanfix.fp32.regions', True),
    ('torchvision.ops', False), ('mmdet_nanfix_of_mine', False),
    ('mmdet.models', False), ('__main__', False)])
def test_libraries_are_known_by_their_modules(module, library):
    """Wherever a system has installed them."""
    assert is_library(frame_in(module)) is library


def test_frames_of_torch_and_of_others():
    seen = []
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: seen.extend(
        [sys._getframe(), sys._getframe(1)]))
    layer(torch.ones(1))
    assert [is_library(frame) for frame in seen] == [False, True]


class Scored(nn.Module):
    """A head whose loss has a formula of this package in a region."""

    def __init__(self):
        super().__init__()
        self.loss_cls = FocalLoss()

    def loss_by_feat(self, score, labels):
        return self.loss_cls(score, labels)


def test_a_formula_that_stands_for_a_loss_is_the_losses():
    model = nn.Module()
    model.bbox_head = Scored()
    sites, seen = CallSites(model), []

    class Look(TorchDispatchMode):

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(sites.here())
            return func(*args, **(kwargs or {}))

    given = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    control = PrecisionControl(model, 'losses', 'cpu')
    with control.active(), Look():
        model.bbox_head.loss_by_feat(*given)
    assert {site.module for site in seen} == {'bbox_head.loss_cls'}
    assert all(site.in_loss for site in seen)


def node_of(sites, name, function, in_thread):
    """The node of an operation that was noted in a thread of its own."""
    made = []

    def build():
        function(torch.ones(3, requires_grad=True))
        result = function(torch.ones(3, requires_grad=True))
        sites.note_last(name, lambda: CallSite(function=name))
        made.append(result.grad_fn)

    if in_thread:
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    else:
        build()
    return made[0]


@pytest.mark.skipif(not HAS_SEQUENCE_NR,
                    reason='nodes tell their numbers from torch 2.1 on')
def test_nodes_of_several_threads_with_the_same_numbers():
    """A thread of its own counts from 0: a backward on a GPU has one."""
    sites = NodeSites()
    wanted = {'exp': torch.exp, 'log': torch.log, 'mul': lambda x: x * 2}
    nodes = {name: node_of(sites, name, function, in_thread=True)
             for name, function in wanted.items()}
    assert len({node._sequence_nr() for node in nodes.values()}) == 1
    here = node_of(sites, 'exp', torch.exp, in_thread=False)
    for name, node in (*nodes.items(), ('exp', here)):
        assert sites.find(node) == (name, CallSite(function=name))


@pytest.mark.skipif(not HAS_SEQUENCE_NR,
                    reason='nodes tell their numbers from torch 2.1 on')
def test_the_first_operation_with_a_number_is_its_nodes():
    """What runs below it, or without a graph, comes later."""
    sites = NodeSites()
    node = node_of(sites, 'exp', torch.exp, in_thread=False)
    sites.note_last('add', lambda: CallSite(function='add'))
    assert sites.find(node) == ('exp', CallSite(function='exp'))
    # Writing to a slice: a node comes between.
    other = node_of(sites, 'log', torch.log, in_thread=False)
    assert other._sequence_nr() > node._sequence_nr()
    assert sites.find(other, other._sequence_nr() - node._sequence_nr()) == (
        sites.find(node))


def test_a_node_that_does_not_tell_its_number_is_known_by_itself():
    sites = NodeSites()
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    assert not sites.knows(node)
    sites.note(node, ('exp', CallSite(function='exp')))
    sites.note(node, ('other', CallSite()))
    assert sites.knows(node)
    if not HAS_SEQUENCE_NR:
        assert sites.find(node) == ('exp', CallSite(function='exp'))


class Walking(nn.Module):
    """Lets go of what it has computed on the way."""

    def __init__(self):
        super().__init__()
        self.alive = []

    def step(self, sites, x):
        sites.here()
        return x + 1

    def forward(self, x, sites):
        for _ in range(3):
            x = x * 2
            before = weakref.ref(x)
            x = self.step(sites, x)
            self.alive.append(before() is not None)
        kept = locals()
        sites.here()
        return x, kept


def test_what_a_forward_lets_go_of_is_let_go():
    """A look at the variables of a frame would keep them until it ends."""
    model = Walking()
    out, kept = model(torch.ones(1), CallSites(model))
    assert model.alive == [False] * 3
    # What somebody else has of them stays.
    assert kept['x'] is out and kept['self'] is model
