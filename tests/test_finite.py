import math

import pytest
import torch
from torch import nn

from mmdet_nanfix.finite import (
    Anchor,
    bad_tensors,
    kind_of,
    reached_parameters,
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
                         nn.Linear(2, 1))


def test_healthy_gradients_are_unchanged(net):
    x = torch.randn(5, 3)
    plain = gradients(net, net(x).mean())
    anchor = Anchor(lambda: list(net.parameters()))
    loss = net(x).mean()
    attached = anchor.attach(loss)
    assert torch.equal(attached, loss)
    guarded = gradients(net, attached)
    assert all(torch.equal(plain[name], guarded[name]) for name in plain)


@pytest.mark.parametrize('value', BAD)
def test_a_bad_loss_marks_one_gradient_element(net, value):
    anchor = Anchor(lambda: list(net.parameters()))
    # The gradient of a constant is finite, so only the anchor can tell.
    loss = net(torch.randn(5, 3)).mean() + value
    grads = gradients(net, anchor.attach(loss))
    assert anchor.parameter is net[1].bias
    bad = {name: int((~torch.isfinite(grad)).sum())
           for name, grad in grads.items()}
    assert bad == {'0.weight': 0, '1.weight': 0, '1.bias': 1, '2.weight': 0,
                   '2.bias': 0}
    assert anchor.own_gradient_finite()
    net[1].bias.grad[1] = math.nan
    assert not anchor.own_gradient_finite()


def test_the_anchor_is_used_trainable_and_of_this_optimizer(net):
    x = torch.randn(5, 3)
    net[1].bias.requires_grad_(False)
    anchor = Anchor(lambda: list(net.parameters()))
    anchor.attach(net(x).mean())
    assert anchor.parameter is net[2].bias
    unused = nn.Parameter(torch.zeros(3))
    anchor = Anchor(lambda: [unused, net[0].weight])
    anchor.attach(net(x).mean())
    assert anchor.parameter is net[0].weight
    anchor = Anchor(lambda: [unused])
    loss = net(x).mean()
    assert anchor.attach(loss) is loss and anchor.own_gradient_finite()


def test_a_frozen_anchor_is_chosen_anew(net):
    x = torch.randn(5, 3)
    anchor = Anchor(lambda: list(net.parameters()))
    anchor.attach(net(x).mean())
    net[1].bias.requires_grad_(False)
    anchor.attach(net(x).mean())
    assert anchor.parameter is net[2].bias


def test_a_loss_without_graph_is_left_alone(net):
    loss = torch.tensor(math.nan)
    assert Anchor(lambda: list(net.parameters())).attach(loss) is loss


def test_half_loss_and_sparse_gradients():
    table = nn.Embedding(4, 3, sparse=True)
    head = nn.Linear(3, 1)
    anchor = Anchor(lambda: [*table.parameters(), *head.parameters()])
    loss = head(table(torch.tensor([1, 2]))).mean().half() + math.inf
    attached = anchor.attach(loss)
    assert attached.dtype == torch.float16
    attached.backward()
    assert anchor.parameter is head.bias
    assert table.weight.grad.is_sparse
    assert bad_tensors([table.weight.grad, head.bias.grad]) == [1]


def test_attach_reads_nothing_from_the_device(net):
    anchor = Anchor(lambda: list(net.parameters()))
    anchor.attach(net(torch.randn(5, 3)).mean())
    with torch.profiler.profile() as profile:
        anchor.attach(net(torch.randn(5, 3)).mean()).backward()
    names = [event.key for event in profile.key_averages()]
    assert 'aten::_local_scalar_dense' not in names


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


def test_kind():
    assert [kind_of(value) for value in (*BAD, 0.)] == [
        'nan', 'inf', '-inf', None]


def test_reached_parameters(net):
    loss = net[2](net[1](torch.randn(1, 3))).sum()
    assert reached_parameters(loss) == {
        id(net[1].weight), id(net[1].bias), id(net[2].weight),
        id(net[2].bias)}
