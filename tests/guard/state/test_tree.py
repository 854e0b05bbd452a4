from __future__ import annotations

import collections
import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmdet_nanfix.guard.state.snapshot import Snapshot
from mmdet_nanfix.guard.state.transaction import Transaction
from mmdet_nanfix.guard.state.tree import StateTree, TreeSnapshot


class Coder:
    """Somebody's object below a module."""

    def __init__(self):
        self.count, self.seen, self.best = 0, [1, 2], None


class Head(nn.Module):

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.coder, self.iters, self.mode = Coder(), 0, 'a'
        self.history, self.table = [], {'a': 1}
        self.ring, self.pairs = collections.deque([1]), (1, [2])
        self.array, self.draws = np.zeros(2), random.Random(0)
        self.register_buffer('mean', torch.zeros(2))


class Model(nn.Module):

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Head(), Head()])


#: What a forward, or a hook between two of them, may do to a head.
CHANGES = {
    'count': lambda head: setattr(head, 'iters', head.iters + 1),
    'count below': lambda head: setattr(head.coder, 'count', 7),
    'append': lambda head: head.history.append(len(head.history)),
    'append an object': lambda head: head.history.append(Coder()),
    'change what was appended': lambda head: [
        setattr(item, 'count', 9) for item in head.history
        if isinstance(item, Coder)],
    'another list': lambda head: setattr(head, 'history', []),
    'an equal list': lambda head: setattr(
        head, 'history', list(head.history)),
    'none becomes a list': lambda head: setattr(head.coder, 'best', [1]),
    'append to that': lambda head: head.coder.best and (
        head.coder.best.append(2)),
    'a new attribute': lambda head: setattr(head, 'new', [0]),
    'append to the new one': lambda head: getattr(
        head, 'new', []).append(1),
    'one attribute for another': lambda head: head.__dict__.pop(
        'mode', None) and setattr(head, 'other', 'b'),
    'an attribute is gone': lambda head: head.__dict__.pop('mode', None),
    'a layer gets one': lambda head: setattr(head.layer, 'scale', 2.),
    'evaluation': lambda head: head.norm.eval(),
    'training': lambda head: head.train(),
    'a key': lambda head: head.table.update(b=2),
    'a deque': lambda head: head.ring.append(2),
    'a list in a tuple': lambda head: head.pairs[1].append(3),
    'an array': lambda head: head.array.__iadd__(1),
    'a draw': lambda head: head.draws.random(),
    'a buffer': lambda head: head.mean.add_(1),
    'another buffer': lambda head: setattr(head, 'mean', torch.ones(2)),
    'a buffer more': lambda head: head.register_buffer(
        'more', torch.ones(1), persistent=False),
    'a child': lambda head: setattr(head, 'child', nn.Identity()),
    'a tensor': lambda head: setattr(head, 'cached', torch.zeros(3)),
    'write to it': lambda head: hasattr(head, 'cached') and (
        head.cached.add_(1)),
    'a number becomes a tensor': lambda head: setattr(
        head, 'iters', torch.tensor([5, 5])),
}


def state_of(model):
    """All that hangs below, in words."""

    def told(value):
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return id(value), value.tolist()
        if isinstance(value, dict):
            return id(value), {key: told(item) for key, item in value.items()}
        if isinstance(value, (list, tuple, collections.deque)):
            return id(value), list(map(told, value))
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, (Coder, nn.Module)):
            return id(value), {name: told(item) for name, item
                               in vars(value).items() if 'hook' not in name}
        return value

    return told(model)


changes = st.lists(st.tuples(st.sampled_from(sorted(CHANGES)),
                             st.integers(0, 1)), max_size=4)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(changes, changes, st.booleans()), min_size=1,
                max_size=6))
def test_whatever_happens_a_failed_forward_leaves_nothing(steps):
    model = Model()
    transaction = Transaction(model, (), StateTree(model).snapshot)

    def change(names):
        for name, index in names:
            CHANGES[name](model.heads[index])

    for _ in range(3):
        transaction.begin()
        transaction.commit()
    for between, within, fails in steps:
        change(between)
        before = state_of(model)
        transaction.begin()
        change(within)
        if fails:
            transaction.rollback()
            assert state_of(model) == before
        else:
            transaction.commit()


def test_what_has_not_changed_is_not_looked_at_again():
    model = Model()
    tree = StateTree(model)
    kinds = [type(tree.snapshot()) for _ in range(4)]
    assert kinds == [Snapshot, Snapshot, TreeSnapshot, TreeSnapshot]
    # Counters are no reason to, new objects are.
    for name, kind in (('count', TreeSnapshot), ('append', TreeSnapshot),
                       ('evaluation', TreeSnapshot),
                       ('append an object', Snapshot),
                       ('a new attribute', Snapshot), ('a child', Snapshot),
                       ('another buffer', Snapshot)):
        CHANGES[name](model.heads[0])
        assert type(tree.snapshot()) is kind, name
        assert type(tree.snapshot()) is TreeSnapshot, name


def test_the_whole_is_looked_at_now_and_then():
    tree = StateTree(Model())
    kinds = [type(tree.snapshot()) for _ in range(1010)]
    assert 2 < kinds.count(Snapshot) <= 5


def test_scripted_code_is_looked_at_each_time():
    class Counting(nn.Module):

        def __init__(self):
            super().__init__()
            self.register_buffer('count', torch.zeros(1))

        def forward(self, x):
            self.count = self.count + 1
            return x + self.count

    model = nn.Sequential(torch.jit.script(Counting()))
    tree = StateTree(model)
    assert {type(tree.snapshot()) for _ in range(5)} == {Snapshot}


def test_what_holds_other_objects_after_each_forward_is_known_apart():
    """Such as the last sampling results of a head."""
    model = Model()
    transaction = Transaction(model, (), StateTree(model).snapshot)
    head = model.heads[0]
    head.results = {}
    kinds = []
    for step in range(8):
        fails = step in (3, 6)
        before = state_of(model)
        transaction.begin()
        kinds.append(type(transaction._before))
        head.results['last'] = [torch.zeros(3), Coder()]
        head.history = [Coder()]
        head.results['last'][1].count += 1
        if fails:
            transaction.rollback()
            assert state_of(model) == before
        else:
            transaction.commit()
    assert kinds == [Snapshot] * 3 + [TreeSnapshot] * 5
