from __future__ import annotations

import collections
import functools
import random

import numpy as np
import pytest
import torch
from helpers.runs import Sampler, Unknown
from torch import nn

from mmdet_nanfix.guard.state import Rng, Snapshot
from mmdet_nanfix.guard.state.transaction import TensorBackup, Transaction


def picture(model):
    """All of the state, as plain values."""
    return {
        **{name: buffer.tolist() for name, buffer in model.named_buffers()},
        'modules': [name for name, _ in model.named_modules()],
        'attributes': sorted(model.__dict__),
        'plain': [model.counter, model.history, dict(model.table),
                  list(model.recent), model.labels, model.array.tolist(),
                  model.plain.tolist(), model.sampler.threshold,
                  model.sampler.seen, model.absent],
    }


@pytest.mark.parametrize('nested', [False, True])
def test_everything_that_a_forward_changes_is_taken_back(nested):
    inner = Unknown()
    model = nn.Sequential(nn.Linear(1, 1), inner) if nested else inner
    before = str(picture(inner))
    replaced, history = inner.replaced, inner.history[1]
    transaction = Transaction(model)
    transaction.begin()
    drawn = inner()
    assert str(picture(inner)) != before
    transaction.rollback()
    assert str(picture(inner)) == before
    # The same objects, not copies of them.
    assert inner.replaced is replaced and inner.history[1] is history
    # All generators draw the same again.
    assert inner() == drawn


def test_what_was_accepted_stays():
    model = Unknown()
    transaction = Transaction(model)
    transaction.begin()
    model()
    transaction.commit()
    transaction.rollback()
    assert model.counter == 1 and model.kept.tolist() == [1, 1, 1]


def test_what_hooks_do_between_forwards_stays():
    """A window of three; what happened between its forwards is not theirs."""
    model = Unknown()
    transaction = Transaction(model)
    for index in range(3):
        transaction.begin()
        model()
        if index < 2:
            transaction.settle()
            # A hook: a switch, a schedule, an epoch.
            model.use_l1 = True
            model.sampler.threshold = .1 * index
            model.table['epoch'] = index
    transaction.rollback()
    assert model.use_l1 is True and model.sampler.threshold == .1
    assert model.table == {'a': [1], 'epoch': 1} or (
        model.table['epoch'] == 1)
    # What the forwards did is gone.
    assert model.counter == 0 and model.history == [1., [2.]]
    assert model.kept.tolist() == [0, 0, 0] and model.absent is None
    assert model.sampler.seen == [] and not hasattr(model, 'fresh')
    assert list(model.recent) == [1, 2] and model.array.tolist() == [0, 0]


def test_what_cannot_be_written_to_is_left_alone():
    model = nn.Module()
    model.fixed = np.broadcast_to(np.zeros(1), 3)
    with torch.inference_mode():
        model.text = torch.zeros(2)
    model.register_buffer('far', torch.zeros(2, device='meta'))
    if hasattr(torch, 'float8_e5m2'):
        model.register_buffer(
            'small', torch.zeros(2).to(torch.float8_e5m2))
    model.register_buffer('plain', torch.zeros(2))
    model.lazy = nn.LazyBatchNorm1d()
    transaction = Transaction(model)
    transaction.begin()
    model.plain += 1
    transaction.rollback()
    assert model.plain.tolist() == [0, 0]


class Ring(collections.deque):

    def __init__(self, length):
        super().__init__(maxlen=length)


def test_containers_of_every_kind():
    model = nn.Module()
    model.ring = Ring(2)
    model.bank = [torch.zeros(1) for _ in range(1203)]
    model.queues = {index: collections.deque() for index in range(1203)}
    model.bound = Sampler().seen.append
    other = Sampler()
    model.method, model.part = other.__init__, functools.partial(
        dict, value=other.seen)
    scripted = torch.jit.script(nn.BatchNorm1d(2))
    model.scripted = scripted
    transaction = Transaction(model)
    transaction.begin()
    model.ring.append(1)
    model.bank[1202] += 1
    model.queues[1202].append(1)
    other.seen.append(1)
    other.threshold = 2
    scripted(torch.rand(3, 2))
    transaction.rollback()
    assert not model.ring and model.bank[1202].item() == 0
    assert not model.queues[1202] and other.seen == []
    assert other.threshold == .5
    assert scripted.running_mean.tolist() == [0, 0]


def test_good_bad_good():
    model = Unknown()
    transaction = Transaction(model)
    for good in (True, False, False, True):
        transaction.begin()
        model.kept += 1
        model.history.append(good)
        (transaction.commit if good else transaction.rollback)()
    assert model.kept.tolist() == [2, 2, 2]
    assert model.history[2:] == [True, True]


def test_a_list_made_in_an_earlier_step_is_known_in_the_next():
    model = Unknown()
    transaction = Transaction(model)
    transaction.begin()
    model.history = [[0]]
    transaction.commit()
    transaction.begin()
    model.history[0].append(1)
    transaction.rollback()
    assert model.history == [[0]]


def test_parameters_are_not_copied():
    model = Unknown()
    transaction = Transaction(model)
    transaction.begin()
    with torch.no_grad():
        model.weight.fill_(3.)
    transaction.rollback()
    assert model.weight.item() == 3


def test_state_elsewhere_is_taken_back_too():
    elsewhere = [1]

    transaction = Transaction(
        nn.Linear(1, 1), [lambda: Snapshot.of([elsewhere])])
    transaction.begin()
    elsewhere.append(2)
    transaction.rollback()
    assert elsewhere == [1]


def test_a_later_mark_of_the_generators_wins():
    """Data loading between micro-steps must not repeat its draws."""
    transaction = Transaction(nn.Linear(1, 1))
    transaction.begin()
    torch.rand(1)
    transaction.begin()
    wanted = torch.rand(3)
    transaction.rollback()
    assert torch.equal(torch.rand(3), wanted)


def test_expanded_and_shared_buffers():
    model = nn.Module()
    model.register_buffer('wide', torch.zeros(1).expand(3))
    model.register_buffer('one', torch.zeros(2))
    model.other = model.one
    transaction = Transaction(model)
    transaction.begin()
    model.one += 1
    transaction.rollback()
    assert model.wide.tolist() == [0, 0, 0]
    assert model.one.tolist() == [0, 0] and model.other is model.one


def test_the_store_uses_its_memory_again():
    store, tensor = TensorBackup(), torch.zeros(2)
    store.copy([tensor])
    (first, ) = store._held.values()
    store.copy([tensor])
    assert next(iter(store._held.values()))[1] is first[1]
    other = torch.ones(2)
    store.copy([other])
    assert list(store._held) == [id(other)]


def test_machinery_and_cycles_are_left_alone():
    import logging
    import threading
    model = nn.Module()
    model.logger, model.lock = logging.getLogger('x'), threading.Lock()
    model.me, model.loop = model, []
    model.loop.append(model.loop)
    transaction = Transaction(model)
    transaction.begin()
    model.logger.disabled = True
    transaction.rollback()
    assert model.logger.disabled
    model.logger.disabled = False


def test_rng_of_all_kinds():
    rng = Rng()
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    rng.restore()
    assert first == (random.random(), np.random.rand(),
                     torch.rand(1).item())


@pytest.mark.skipif(not hasattr(torch, '_foreach_copy_'),
                    reason='torch 2.0 has no copy of several tensors')
def test_one_fused_copy_for_each_dtype():
    from measuring import Calls
    model = nn.Sequential(*[nn.BatchNorm1d(2) for _ in range(10)])
    transaction = Transaction(model)
    transaction.begin()
    transaction.commit()
    with Calls() as calls:
        transaction.begin()
    assert dict(calls.by_name) == {'_foreach_copy_': 2}
