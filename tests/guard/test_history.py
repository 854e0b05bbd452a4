from __future__ import annotations

import math

import pytest
import torch
from helpers.toy import ToyDetector

from mmdet_nanfix.guard.history import History


def made(optimizer=torch.optim.SGD, steps=0, norm=2., loss=1., **settings):
    torch.manual_seed(0)
    model = ToyDetector()
    settings.setdefault('lr', .1)
    history = History(optimizer(model.parameters(), **settings))
    for _ in range(steps):
        history.accept(norm, torch.tensor(loss))
    return history, model


def test_nothing_is_known_at_first():
    history, model = made()
    assert history.largest is None and history.sane(1.) is None
    assert history.safe_rate() is None


@pytest.mark.parametrize('norm, sane', [(2., True), (20., True), (20.1, False),
                                        (math.inf, False),
                                        (math.nan, False)])
def test_ten_times_the_largest_of_late_is_absurd(norm, sane):
    history, _ = made(steps=3)
    history.accept(torch.tensor(1.))
    assert history.sane(norm) is sane


def test_norms_are_measured_without_a_read():
    history, model = made()
    assert history.measure() is None
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in model.parameters())
    norm = history.measure()
    assert isinstance(norm, torch.Tensor)
    assert math.isclose(float(norm), math.sqrt(count), rel_tol=1e-5)
    # Half gradients, whose squares leave half's range.
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
        parameter.grad = torch.full_like(parameter, 6e4)
    assert math.isclose(float(history.measure()), 6e4 * math.sqrt(count),
                        rel_tol=1e-3)




def test_what_was_usual():
    history, _ = made(steps=3)
    history.accept(50.)
    assert history.usual == 2. and history.usual_loss('loss') is None
    history, _ = made()
    for index in range(40):
        history.accept(1., None, {'loss': [torch.tensor(
            9. if index == 30 else .5)] * 2})
        # Terms are looked at now and then, and four times at least.
        assert (history.usual_loss('loss') is None) is (index < 30)
    assert history.usual_loss('loss') == 1.
    assert history.usual_loss('other') is None


def test_a_norm_that_is_too_long_for_fp32_is_no_measure():
    history, _ = made(steps=1)
    history.accept(math.inf)
    history.accept(0.)
    assert history.largest == 2. and history.sane(1e30) is False


def test_a_map_of_losses_is_not_kept():
    history, _ = made()
    history.accept(1., None, {'loss': [torch.ones(100, 100)]})
    (term, ) = history._losses[0]['loss']
    assert term.untyped_storage().nbytes() <= 8


def test_norms_are_measured_now_and_then():
    history, _ = made()
    due = []
    for _ in range(40):
        due.append(history.is_due)
        history.accept(None)
    assert all(due[:20]) and due[20:] == [True, False, False, False] * 5


def test_only_the_last_steps_count():
    history, _ = made(steps=1, norm=1e6)
    for _ in range(50):
        history.accept(1.)
    assert history.largest == 1.












def test_the_largest_is_in_checkpoints_and_a_plain_number():
    history, _ = made(steps=2)
    state = history.state_dict()
    assert state == {'nanfix_grad_norm': 2.}
    again, _ = made()
    again.load_state_dict(state)
    assert again.sane(20.) is True and again.sane(21.) is False
    for _ in range(50):
        again.accept(1.)
    # It is forgotten like any other.
    assert again.largest == 1.
    again.load_state_dict({})
    assert again.sane(1.) is None


def test_graphs_are_let_go():
    history, model = made()
    loss = model.rpn_head.out.weight.sum()
    history.accept(1., loss, {'loss': [loss]})
    assert not history._losses[0]['loss'][0].requires_grad
    assert not history._totals[0].requires_grad
