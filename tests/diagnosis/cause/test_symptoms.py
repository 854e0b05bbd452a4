from __future__ import annotations

import math

import pytest
import torch
from helpers.guards import parts_of
from helpers.toy import ToyDetector

from mmdet_nanfix.diagnosis.cause.symptoms import Symptoms


def made(optimizer=torch.optim.SGD, steps=0, norm=2., loss=1., **settings):
    """Parts of a step, after some that were accepted."""
    torch.manual_seed(0)
    model = ToyDetector()
    settings.setdefault('lr', .1)
    parts = parts_of(model, optimizer=optimizer(
        model.parameters(), **settings))
    for _ in range(steps):
        parts.history.accept(norm, torch.tensor(loss))
    return parts


def read(parts, name):
    return Symptoms(parts).read(None)[name]


def test_nothing_is_known_at_first():
    symptoms = Symptoms(made()).read(None)
    assert set(symptoms) == {'moments', 'eps', 'update', 'growth'}
    assert not any(symptom.bad for symptom in symptoms.values())


@pytest.mark.parametrize('steps, norm, bad, words', [
    (0, 9., False, 'no step was accepted before, to compare a gradient norm '
     'of 9 with'),
    (3, 9., False, 'a gradient norm of 9, where the largest of the last '
     'accepted steps is 2'),
    (3, 99., True, 'a gradient norm of 99, where the largest of the last '
     'accepted steps is 2')])
def test_a_norm_is_held_against_those_of_late(steps, norm, bad, words):
    symptom = Symptoms(made(steps=steps)).read(norm)['norm']
    assert (symptom.bad, symptom.words) == (bad, words)


def test_a_loss_below_zero_has_not_grown():
    assert not read(made(steps=9, loss=-.7), 'growth').bad
    parts = made(steps=9, loss=0.)
    parts.history.accept(2., torch.tensor(1.))
    assert not read(parts, 'growth').bad


@pytest.mark.parametrize('losses, norms, bad', [
    ([1.] * 9, [1.] * 9, False), ([1.] * 8 + [9.], [1.] * 9, False),
    ([1.] * 8 + [11.], [1.] * 9, True), ([1.] * 9, [1.] * 8 + [11.], True),
    ([1., 11.], [1., 11.], False)])
def test_growth_is_against_what_was_usual(losses, norms, bad):
    parts = made()
    for loss, norm in zip(losses, norms):
        parts.history.accept(norm, torch.tensor(loss))
    symptom = read(parts, 'growth')
    assert symptom.bad is bad
    if bad:
        assert 'from 1 to 11 within 9 accepted steps' in symptom.words


@pytest.mark.parametrize('optimizer, rate, bad', [
    (torch.optim.SGD, 1e-3, False), (torch.optim.SGD, 1e3, True),
    (torch.optim.AdamW, 1e-3, False), (torch.optim.AdamW, 10., True)])
def test_a_step_longer_than_half_of_the_weights(optimizer, rate, bad):
    parts = made(optimizer, steps=2, lr=rate)
    symptom = read(parts, 'update')
    assert symptom.bad is bad and f'learning rate {rate:.3g},' in symptom.words
    safe = parts.history.safe_rate()
    if bad:
        assert safe < rate / 20
        again = made(optimizer, steps=2, lr=safe)
        assert not read(again, 'update').bad
        assert again.history.last_update() <= (
            .011 * again.history.weight_norm)


def test_weights_that_have_grown_since_are_no_measure():
    """The update is in them."""
    parts = made(steps=2, lr=1e12)
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.fill_(math.inf)
    symptom = read(parts, 'update')
    assert symptom.bad and 'inf' not in symptom.words


def test_moments_are_looked_at():
    parts = made(torch.optim.Adam)
    sum(parameter.sum() for parameter in parts.model.parameters()).backward()
    parts.optimizer.step()
    assert not read(parts, 'moments').bad
    state = parts.optimizer.state[parts.model.rpn_head.out.weight]
    state['exp_avg_sq'][0, 2] = math.nan
    symptom = read(parts, 'moments')
    assert symptom.bad
    assert symptom.words == ("Adam's exp_avg_sq of rpn_head.out.weight is not "
                             'finite')


@pytest.mark.parametrize('eps, dtype, bad', [
    (1e-8, torch.float32, False), (0., torch.float32, True),
    (1e-8, torch.float16, True), (1e-4, torch.float16, False)])
def test_an_eps_that_is_zero_in_the_dtype_of_its_weights(eps, dtype, bad):
    torch.manual_seed(0)
    model = ToyDetector().to(dtype)
    parts = parts_of(model, optimizer=torch.optim.Adam(
        model.parameters(), eps=eps))
    assert read(parts, 'eps').bad is bad
