from __future__ import annotations

import threading

import pytest
import torch
from helpers.batches import batch, boxes
from helpers.guards import FakeRanks, parts_of
from torch import nn

from mmdet_nanfix.diagnosis import investigate
from mmdet_nanfix.diagnosis.context import RunContext
from mmdet_nanfix.diagnosis.findings import ReplayStatus
from mmdet_nanfix.diagnosis.investigate import Investigator
from mmdet_nanfix.diagnosis.parts import ModelParts
from mmdet_nanfix.diagnosis.replay.driver import MOST
from mmdet_nanfix.guard import CapturedForward
from mmdet_nanfix.guard.state import BatchSnapshot, Rng
from mmdet_nanfix.guard.state.transaction import Transaction


class Detector(nn.Module):
    num_classes = 3

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, inputs, data_samples):
        pixels = torch.stack(inputs).float().mean((1, 2, 3))
        sizes = torch.stack([
            boxes({'data_samples': data_samples}, row)[:, 2:].sum()
            - boxes({'data_samples': data_samples}, row)[:, :2].sum()
            for row in range(len(data_samples))])
        return {'loss': (self.linear(pixels[:, None])
                         + sizes.log()[:, None]).mean()}


def investigated(made, good=None, ranks=None, kept=None):
    model = Detector()
    step = parts_of(model, ranks=ranks)
    return Investigator(step, ModelParts(model)).investigate(
        CapturedForward(kept or BatchSnapshot(dict(made)), Rng(), False),
        RunContext(alone=ranks is None), good)


def test_the_whole_way():
    made = batch(3)
    boxes(made, 1).zero_()
    found = investigated(made)
    assert found.origin.op == 'log' and found.failed == 'loss'
    assert found.status is ReplayStatus.REPRODUCED
    assert found.origin.site.source.startswith(__file__)
    assert {image['img_path'] for image in found.images} == {'1.jpg'}
    found = investigated(batch(2))
    assert found.replay == 'the failure did not come again in a replay'
    assert found.status is ReplayStatus.NOT_REPRODUCED


def uncopyable():
    """A batch that is no use where one is looked for in it."""
    lock = threading.Lock()
    return BatchSnapshot({'inputs': [lock], 'data_samples': [lock]})


def test_a_search_that_fails_is_told_and_raises_nothing():
    made = batch(2)
    boxes(made, 1).zero_()
    made['data_samples'][0].set_field(threading.Lock(), 'lock')
    found = investigated(made)
    # What was found before stays.
    assert 'raised TypeError' in found.tests[-1]
    assert found.origin.op == 'log' and found.images is None
    found = investigated(batch(2), good=uncopyable())
    assert 'raised TypeError' in found.replay and found.origin is None


def test_a_batch_that_was_written_to_is_not_replayed():
    made = batch(2)
    kept = BatchSnapshot(made)
    boxes(made, 0).mul_(2)
    found = investigated(made, kept=kept)
    assert 'has written to the batch' in found.replay
    assert found.status is ReplayStatus.NOT_MADE


@pytest.mark.parametrize('others', [0, 1, 3, 50])
def test_all_processes_make_as_many_replays(others):
    """Another rank wants some more, or fewer."""
    unable, rounds = [], []

    def which(flag):
        if not unable:
            unable.append(flag)
            return []
        rounds.append(flag)
        return [0] if flag or len(rounds) <= others else []

    # Who does not ask makes what another one asks for.
    ranks = FakeRanks(which, lambda value, source: value or {})
    made = batch(2)
    boxes(made, 1).zero_()
    found = investigated(made, ranks=ranks)
    assert found.origin.op == 'log' and unable == [False]
    # One of its own: with another batch a rank may raise by itself.
    assert sum(rounds) == 1 and found.images is None
    assert len(rounds) == max(1, min(others, MOST)) + (others < 50)


def test_a_rank_that_fails_to_search_keeps_step_with_the_others():
    asked = []

    def which(flag):
        asked.append(flag)
        return [] if len(asked) in (1, 4) else [1]

    ranks = FakeRanks(which, lambda value, source: {})
    found = investigated(batch(2), good=uncopyable(), ranks=ranks)
    assert 'raised TypeError' in found.replay
    assert asked == [False] * 4


def test_where_one_rank_cannot_none_does():
    made = batch(2)
    boxes(made, 1).zero_()
    ranks = FakeRanks(lambda flag: [1])
    assert investigated(made, ranks=ranks).replay == 'another rank cannot'


def test_no_memory_around_a_replay(monkeypatch):
    """Not only within it: copies and looks need some too."""
    made = batch(2)
    boxes(made, 1).zero_()

    def full(*args):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(investigate, 'is_finite', full)
    assert investigated(made).replay == 'the replay ran out of memory'
    monkeypatch.undo()
    monkeypatch.setattr(Transaction, 'begin', full)
    assert investigated(made).replay == 'the replay ran out of memory'
