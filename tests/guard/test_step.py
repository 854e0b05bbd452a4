from __future__ import annotations

import math

import pytest
import torch
from helpers.guards import FakeRanks, Running, go, guard_of, run
from helpers.toy import toy_batch

from mmdet_nanfix.incidents import IncidentText


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
    with guard.capture():
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
    guard = guard_of(toy, FakeRanks(lambda flag: [1]))
    with guard.capture():
        losses = toy(**toy_batch())
    guard.attach(toy.parse_losses(losses)[0]).backward()
    # What an all-reduce with a rank of bad loss leaves here.
    guard.parts.anchor.parameter.grad[0] = math.nan
    incident = guard.judge(found_inf=True).incident
    assert incident.where.phase == 'loss' and incident.where.head is None
    assert incident.loss_scale.after == 256
    assert all(not state.bad_grads for state in incident.heads.values())


def test_the_hook_is_gone_after_each_forward(toy):
    guard = guard_of(toy)
    with pytest.raises(ZeroDivisionError), guard.capture():
        assert len(toy._forward_hooks) == 1
        raise ZeroDivisionError
    assert not toy._forward_hooks






def test_a_poisoned_buffer_is_seen_and_taken_back():
    guard = guard_of(Running())
    x = torch.ones(3, 2)
    assert go(guard, x=x).incident is None
    before = guard.model.mean.clone()
    incident = go(guard, x=x * math.inf).incident
    assert (incident.where.phase, incident.where.module) == (
        'buffers', 'mean')
    assert torch.equal(guard.model.mean, before)
    # The scale is not to blame.
    assert incident.loss_scale.after == 256
    assert 'buffers mean' in IncidentText(incident.to_dict()).line
    assert go(guard, x=x).incident is None


def test_a_loss_that_nothing_can_carry():
    """The whole forward within a reentrant checkpoint."""
    from torch.utils.checkpoint import checkpoint

    class Whole(torch.nn.Module):

        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(2, 1)

        def forward(self, x, add):
            out = checkpoint(lambda y: self.head(y).mean(),
                             x.requires_grad_(), use_reentrant=True)
            return {'loss': out + add}

    guard = guard_of(Whole())
    for add, bad in ((0., False), (math.inf, True), (0., False)):
        with guard.capture():
            losses = guard.model(x=torch.ones(3, 2), add=add)
        guard.attach(losses['loss']).backward()
        assert bool(guard.flag.isnan()) is bad
        guard.judge(bad)


def test_a_taint_fails_the_step():
    guard = guard_of(Running())
    for flag, bad in ((0., False), (math.nan, True)):
        guard.model.zero_grad()
        with guard.capture():
            losses = guard.model(x=torch.ones(3, 2))
            guard.flag_step(torch.tensor(flag))
        guard.attach(losses['loss']).backward()
        found = not torch.isfinite(guard.model.head.bias.grad).all()
        assert found is bad
        guard.judge(found)


def test_shards_leave_the_flag_to_the_host():
    model = Running()
    guard = guard_of(model, sharded=True)
    for x, finite in ((1., True), (math.nan, False), (1., True)):
        with guard.capture():
            losses = model(x=torch.full((3, 2), x))
        loss = losses['loss']
        assert guard.attach(loss) is loss
        assert bool(torch.isfinite(guard.flag)) is finite
        guard.judge(not finite)
        assert guard.flag is None


class Matching(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.bbox_head = torch.nn.Linear(2, 2)
        self.register_buffer('seen', torch.zeros(()))
        self.drawn = []

    def forward(self, x, typo=False):
        from scipy.optimize import linear_sum_assignment
        self.seen += 1
        self.drawn.append(torch.rand(1))
        out = self.bbox_head(x)
        if typo:
            return out.no_such_thing
        linear_sum_assignment(out.detach().numpy())
        return {'loss': out.mean()}


def test_an_exception_of_non_finite_numbers_is_an_incident():
    guard = guard_of(Matching())
    x = torch.ones(2, 2)
    assert go(guard, x=x).incident is None
    torch.manual_seed(3)
    guard.model.zero_grad()
    with guard.capture():
        losses = guard.model(x=x * math.nan)
    assert guard.attach(losses['loss']) is None
    assert guard.must_skip
    incident = guard.judge(True).incident
    assert incident.error.startswith('ValueError: matrix contains invalid')
    # It was raised in the forward, and began in what the model was given.
    assert incident.where.phase == 'input'
    assert incident.origin['reached'] == 'an exception'
    assert 'raised ValueError' in IncidentText(incident.to_dict()).line
    assert guard.model.seen == 1 and len(guard.model.drawn) == 1
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)
    assert go(guard, x=x).incident is None
    assert 'forward' not in guard.model.__dict__


def test_another_exception_is_raised_untouched():
    guard = guard_of(Matching())
    with pytest.raises(AttributeError, match='no_such_thing') as caught:
        go(guard, x=torch.ones(2, 2) * math.nan, typo=True)
    assert caught.traceback[-1].name == 'forward'
    assert 'forward' not in guard.model.__dict__


def test_with_several_ranks_an_exception_is_raised():
    model = Matching()
    guard = guard_of(model, FakeRanks(lambda bad: [0]))
    with pytest.raises(ValueError, match='invalid numeric'):
        go(guard, x=torch.ones(2, 2) * math.nan)


class Short(torch.nn.Module):
    """There is memory for a step, and none for a probe around it."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 1)

    def forward(self, x):
        if torch.utils._python_dispatch._get_current_dispatch_mode():
            raise torch.cuda.OutOfMemoryError('CUDA out of memory')
        return {'loss': self.head(x).mean()}


def test_a_replay_without_memory_is_said_and_training_goes_on():
    guard = guard_of(Short())
    verdicts = [go(guard, x=torch.full((3, 2), x))
                for x in (1., math.inf, 1.)]
    assert [verdict.incident is None for verdict in verdicts] == [
        True, False, True]
    incident = verdicts[1].incident
    assert incident.replay == 'the replay ran out of memory'
    assert incident.origin is None and incident.where.phase == 'loss'


@pytest.mark.parametrize('most, told', [(0, 0), (2, 2), (None, 4)])
def test_so_many_incidents_are_looked_into(toy, most, told):
    guard = guard_of(toy, max_incidents=most)
    found = [run(guard, toy_batch(box=math.inf)).incident for _ in range(4)]
    assert [incident.origin is not None for incident in found] == (
        [True] * told + [False] * (4 - told))
    assert all(incident.replay == 'there were too many before'
               for incident in found[told:])


def test_the_next_window_gets_a_fresh_gradient():
    """What a replay went back through is gone."""
    guard = guard_of(Running())
    x = torch.ones(3, 2)
    go(guard, x=x)
    expected = guard.model.head.weight.grad.clone()
    go(guard, x=x * math.inf)
    assert all(p.grad is None for p in guard.model.parameters())
    go(guard, x=x)
    assert torch.equal(guard.model.head.weight.grad, expected)


class Roots(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return {'loss': (self.head.weight * x).sqrt().sum()}


@pytest.mark.parametrize('bad_at', [0, 1, 2])
def test_bad_gradients_of_any_micro_step_are_located(bad_at):
    guard = guard_of(Roots())
    with torch.no_grad():
        guard.model.head.weight.fill_(1.)
    for index in range(3):
        with guard.capture():
            losses = guard.model(
                x=torch.zeros(1) if index == bad_at else torch.ones(1))
        guard.attach(losses['loss']).backward()
    incident = guard.judge(True).incident
    assert incident.where.phase == 'backward' and incident.where.op == 'sqrt'
    assert incident.replay is None


class Masked(torch.nn.Module):
    """A weight that is a mask, and something wrong elsewhere."""

    def __init__(self):
        super().__init__()
        self.mask = torch.nn.Parameter(torch.tensor([0., -math.inf]),
                                       requires_grad=False)
        self.head = torch.nn.Linear(2, 2)

    def forward(self, x):
        y = (self.head(x) + self.mask).amax(-1) + x.sum() / x.sum()
        return {'loss': y.mean()}


@pytest.mark.parametrize('most', [0, 100])
def test_a_weight_that_is_a_mask_is_not_blamed(most):
    model = Masked()
    guard = guard_of(model, max_incidents=most)
    incident = go(guard, x=torch.zeros(1, 2)).incident
    assert incident.where.phase == ('loss' if most == 0 else 'forward')
    assert incident.where.op == (None if most == 0 else 'div')


def test_a_parameter_that_is_replaced_one_for_one_is_known(toy):
    """Else the anchor would be none, or what is not trained any more."""
    guard = guard_of(toy)
    run(guard, toy_batch())
    (group, ) = guard.parts.optimizer.param_groups
    old = toy.rpn_head.out.bias
    for module in toy.modules():
        for name, parameter in list(module._parameters.items()):
            index = [item is parameter for item in group['params']].index(
                True)
            new = torch.nn.Parameter(parameter.detach().clone())
            module._parameters[name] = group['params'][index] = new
    run(guard, toy_batch())
    assert guard.parts.anchor.parameter is not None
    assert guard.parts.anchor.parameter is not old
