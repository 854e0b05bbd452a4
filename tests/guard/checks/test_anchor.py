from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mmdet_nanfix.guard.checks.anchor import Anchor, leaves_of
from mmdet_nanfix.guard.checks.finite import (
    bad_tensors,
)

BAD = [math.nan, math.inf, -math.inf]


def gradients(module, loss):
    module.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter
            in module.named_parameters()}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2),
                         nn.Linear(2, 2))


def test_healthy_gradients_are_unchanged(net):
    x = torch.randn(5, 3)
    plain = gradients(net, net(x).mean())
    anchor = Anchor(lambda: set(map(id, net.parameters())))
    loss = net(x).mean()
    attached = anchor.attach(loss)
    assert torch.equal(attached, loss)
    guarded = gradients(net, attached)
    assert all(torch.equal(plain[name], guarded[name]) for name in plain)


@pytest.mark.parametrize('value', BAD)
def test_a_bad_loss_marks_one_gradient_element(net, value):
    anchor = Anchor(lambda: set(map(id, net.parameters())))
    # The gradient of a constant is finite, so only the anchor can tell.
    loss = net(torch.randn(5, 3)).mean() + value
    grads = gradients(net, anchor.attach(loss))
    assert anchor.parameter is net[2].bias
    bad = {name: int((~torch.isfinite(grad)).sum())
           for name, grad in grads.items()}
    assert bad == {'0.weight': 0, '1.weight': 0, '1.bias': 0, '2.weight': 0,
                   '2.bias': 1}
    assert anchor.own_gradient_finite()
    net[2].bias.grad[1] = math.nan
    assert not anchor.own_gradient_finite()


def test_the_anchor_is_used_trainable_and_of_this_optimizer(net):
    x = torch.randn(5, 3)
    net[2].bias.requires_grad_(False)
    anchor = Anchor(lambda: set(map(id, net.parameters())))
    anchor.attach(net(x).mean())
    assert anchor.parameter is net[1].bias
    unused = nn.Parameter(torch.zeros(3))
    anchor = Anchor(lambda: {id(unused), id(net[0].weight)})
    anchor.attach(net(x).mean())
    assert anchor.parameter is net[0].weight
    anchor = Anchor(lambda: {id(unused)})
    loss = net(x).mean()
    assert anchor.attach(loss) is loss and anchor.own_gradient_finite()


def test_a_frozen_anchor_is_chosen_anew(net):
    x = torch.randn(5, 3)
    anchor = Anchor(lambda: set(map(id, net.parameters())))
    anchor.attach(net(x).mean())
    net[2].bias.requires_grad_(False)
    anchor.attach(net(x).mean())
    assert anchor.parameter is net[1].bias


def test_two_graphs_in_turn_have_anchors_of_their_own():
    """The other one's would be moved by weight decay and momentum."""
    stems = [nn.Linear(3, 2), nn.Linear(3, 2)]
    anchor = Anchor(lambda: {id(parameter) for stem in stems
                             for parameter in stem.parameters()})
    for turn in (0, 1, 0):
        loss = anchor.attach(stems[turn](torch.ones(1, 3)).sum())
        loss.backward()
        assert anchor.parameter is stems[turn].bias
        if turn == 0:
            assert stems[1].bias.grad is None
            stems[0].zero_grad(), stems[1].zero_grad()
        else:
            assert stems[0].bias.grad is None
            stems[1].zero_grad()


def test_the_flag_goes_with_the_loss(net):
    anchor = Anchor(lambda: set(map(id, net.parameters())))
    for flag, bad in ((0., False), (math.nan, True)):
        net.zero_grad()
        anchor.attach(net(torch.ones(1, 3)).sum(),
                      torch.tensor(flag)).backward()
        assert net[2].bias.grad.isnan().any() == bad


def test_a_loss_without_graph_is_left_alone(net):
    loss = torch.tensor(math.nan)
    assert Anchor(lambda: set(map(id, net.parameters()))).attach(loss) is loss


def test_half_loss_and_sparse_gradients():
    table = nn.Embedding(4, 3, sparse=True)
    head = nn.Linear(3, 1)
    anchor = Anchor(lambda: set(map(
        id, [*table.parameters(), *head.parameters()])))
    loss = head(table(torch.tensor([1, 2]))).mean().half() + math.inf
    attached = anchor.attach(loss)
    assert attached.dtype == torch.float16
    attached.backward()
    assert anchor.parameter is head.bias
    assert table.weight.grad.is_sparse
    assert bad_tensors([table.weight.grad, head.bias.grad]) == [1]


def test_attach_reads_nothing_from_the_device(net):
    anchor = Anchor(lambda: set(map(id, net.parameters())))
    anchor.attach(net(torch.randn(5, 3)).mean())
    with torch.profiler.profile() as profile:
        anchor.attach(net(torch.randn(5, 3)).mean()).backward()
    names = [event.key for event in profile.key_averages()]
    assert 'aten::_local_scalar_dense' not in names


def test_leaves_come_nearest_first(net):
    loss = net[2](net[1](torch.randn(1, 3))).sum()
    leaves = [id(leaf) for leaf in leaves_of(loss)]
    assert leaves[0] == id(net[2].bias)
    assert set(leaves) == {id(parameter) for layer in net[1:]
                           for parameter in layer.parameters()}
