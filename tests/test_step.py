import math

import pytest
import torch
from conftest import toy_batch

from mmdet_nanfix.policy import LossScale, LossScaleSettings, StopRule
from mmdet_nanfix.step import GuardedStep


def guard_of(model, **stop):
    optimizer = torch.optim.SGD(model.parameters(), .1)
    return GuardedStep(model, optimizer, LossScale(LossScaleSettings()),
                       StopRule(**stop), clock=lambda: (1, 5))


def run(guard, *batches):
    """One optimizer step; returns the verdict."""
    guard.model.zero_grad()
    for batch in batches:
        with guard.watch():
            losses = guard.model(**batch)
        total, _ = guard.model.parse_losses(losses)
        (guard.attach(total) * guard.scale.scale).backward()
    found_inf = not all(torch.isfinite(parameter.grad).all()
                        for parameter in guard.model.parameters())
    return guard.judge(found_inf)


def test_good_bad_bad_good(toy):
    guard = guard_of(toy)
    verdicts = [run(guard, toy_batch(box=box))
                for box in (1., math.nan, 1e37, 1.)]
    assert [v.incident is None for v in verdicts] == [
        True, False, False, True]
    assert guard.scale.scale == 128
    assert (guard.stop.consecutive, guard.stop.total, guard.stop.steps) == (
        0, 2, 4)


def test_a_bad_loss_names_its_head_and_spares_the_scale(toy):
    incident = run(guard_of(toy), toy_batch(box=math.nan)).incident
    assert incident.where.phase == 'loss'
    assert incident.where.head == 'roi_head.bbox_head'
    assert incident.where.kind == 'nan'
    assert incident.loss_scale.before == incident.loss_scale.after == 256
    box = incident.heads['roi_head.bbox_head']
    assert box.bad_losses == ['loss_second'] and box.n_params == 4
    assert incident.heads['rpn_head'].fine
    assert list(incident.heads) == ['backbone', 'rpn_head',
                                    'roi_head.bbox_head']
    assert (incident.epoch, incident.iter) == (1, 5)


def test_a_constant_bad_loss_is_seen_although_gradients_are_fine(toy):
    guard = guard_of(toy)
    with guard.watch():
        losses = toy(**toy_batch())
    losses['loss_second'] = losses['loss_second'] + math.inf
    total, _ = toy.parse_losses(losses)
    guard.attach(total).backward()
    incident = guard.judge(found_inf=True).incident
    assert incident.where.head == 'roi_head.bbox_head'
    assert incident.where.kind == 'inf'
    # The anchor's NaN is a flag, not evidence.
    assert all(not state.bad_grads for state in incident.heads.values())


def test_overflowing_gradients_name_the_head_that_owns_them(toy):
    incident = run(guard_of(toy), toy_batch(box=1e37)).incident
    assert incident.where.phase == 'backward'
    assert incident.where.head == 'roi_head.bbox_head'
    assert (incident.loss_scale.before, incident.loss_scale.after) == (
        256, 128)
    box = incident.heads['roi_head.bbox_head']
    assert box.fine is False and box.bad_losses == []
    assert set(box.bad_grads) <= {
        f'roi_head.bbox_head.{name}.{kind}'
        for name in ('hidden', 'out') for kind in ('weight', 'bias')}
    assert incident.heads['rpn_head'].fine


def test_bad_weights_come_first(toy):
    with torch.no_grad():
        toy.rpn_head.out.weight[0, 0] = math.nan
    incident = run(guard_of(toy), toy_batch()).incident
    assert incident.where.phase == 'params'
    assert incident.where.head == 'rpn_head'
    assert incident.where.module == 'rpn_head.out'


@pytest.mark.parametrize('bad_at', [0, 1, 2])
def test_a_bad_micro_step_spoils_its_window_and_is_the_one_shown(toy, bad_at):
    guard = guard_of(toy)
    batches = [toy_batch() for _ in range(3)]
    batches[bad_at] = toy_batch(rpn=math.nan)
    incident = run(guard, *batches).incident
    assert incident.where.head == 'rpn_head'
    assert incident.counts.steps == 1
    assert run(guard, *[toy_batch()] * 3).incident is None


def test_stop(toy):
    guard = guard_of(toy, max_consecutive=2)
    first, second = (run(guard, toy_batch(rpn=math.nan)) for _ in range(2))
    assert first.stop is None and first.incident.action == 'skipped'
    assert '2 optimizer steps' in second.stop
    assert second.incident.action == 'aborted'


def test_a_loss_that_is_bad_on_another_rank_only(toy):
    guard = guard_of(toy)
    guard._agree = lambda flag: True
    with guard.watch():
        losses = toy(**toy_batch())
    guard.attach(toy.parse_losses(losses)[0]).backward()
    # What an all-reduce with a rank of bad loss leaves here.
    guard._anchor.parameter.grad[0] = math.nan
    incident = guard.judge(found_inf=True).incident
    assert incident.where.phase == 'loss' and incident.where.head is None
    assert incident.loss_scale.after == 256
    assert all(not state.bad_grads for state in incident.heads.values())


def test_the_hook_is_gone_after_each_forward(toy):
    guard = guard_of(toy)
    with pytest.raises(ZeroDivisionError), guard.watch():
        assert len(toy._forward_hooks) == 1
        raise ZeroDivisionError
    assert not toy._forward_hooks
