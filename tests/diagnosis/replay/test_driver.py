from __future__ import annotations

import pytest
import torch
from helpers.batches import batch, boxes
from torch import nn

from mmdet_nanfix.diagnosis.replay.batch_view import BatchSnapshot
from mmdet_nanfix.diagnosis.replay.driver import Locator
from mmdet_nanfix.diagnosis.replay.origin import MOST
from mmdet_nanfix.diagnosis.replay.replayer import Forward
from mmdet_nanfix.guard import Host
from mmdet_nanfix.guard.state import Rng, Transaction
from mmdet_nanfix.guard.state.buffers import WatchedBuffers


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


def locator(made, model=None, good=None, **settings):
    model = model or Detector()
    found = Locator(model, Transaction(model), Host())
    arguments = dict(inputs=made['inputs'], data_samples=made['data_samples'])
    return found.find(Forward(BatchSnapshot(arguments), Rng(), False), good, 1.,
                      WatchedBuffers(model), **settings)


def test_the_whole_way():
    made = batch(3)
    boxes(made, 1).zero_()
    found = locator(made)
    assert found.origin.op == 'log' and found.failed == 'loss'
    assert found.origin.site.source.startswith(__file__)
    assert {image['img_path'] for image in found.images} == {'1.jpg'}
    assert locator(batch(2)).replay == (
        'the failure did not come again in a replay')


def test_a_search_that_fails_is_told_and_raises_nothing():
    made = batch(2)
    boxes(made, 1).zero_()
    import threading
    made['data_samples'][0].set_field(threading.Lock(), 'lock')
    found = locator(made)
    # What was found before stays.
    assert 'raised TypeError' in found.tests[-1]
    assert found.origin.op == 'log' and found.images is None
    lock = threading.Lock()
    good = BatchSnapshot({'inputs': [lock], 'data_samples': [lock]})
    found = locator(batch(2), good=good)
    assert 'raised TypeError' in found.replay and found.origin is None


def test_a_batch_that_was_written_to_is_not_replayed():
    model = Detector()
    made = batch(2)
    kept = BatchSnapshot(made)
    boxes(made, 0).mul_(2)
    found = Locator(model, Transaction(model), Host()).find(
        Forward(kept, Rng(), False), None, 1., WatchedBuffers(model))
    assert 'has written to the batch' in found.replay


@pytest.mark.parametrize('others', [0, 1, 3, 50])
def test_all_processes_make_as_many_replays(others):
    """Another rank wants some more, or fewer."""
    unable, rounds = [], []

    def agree(flag):
        if not unable:
            unable.append(flag)
            return []
        rounds.append(flag)
        return [0] if flag or len(rounds) <= others else []

    made = batch(2)
    boxes(made, 1).zero_()
    found = locator(made, agree=agree)
    assert found.origin.op == 'log' and unable == [False]
    # One of its own: with another batch a rank may raise by itself.
    assert sum(rounds) == 1 and found.images is None
    assert len(rounds) == max(1, min(others, MOST)) + (others < 50)


def test_a_rank_that_fails_to_search_keeps_step_with_the_others():
    asked = []

    def agree(flag):
        asked.append(flag)
        return [] if len(asked) in (1, 4) else [1]

    import threading
    lock = threading.Lock()
    good = BatchSnapshot({'inputs': [lock], 'data_samples': [lock]})
    found = locator(batch(2), good=good, agree=agree)
    assert 'raised TypeError' in found.replay
    assert asked == [False] * 4


def test_where_one_rank_cannot_none_does():
    made = batch(2)
    boxes(made, 1).zero_()
    assert locator(made, agree=lambda flag: [1]).replay == (
        'another rank cannot')


def test_no_memory_around_a_replay(monkeypatch):
    """Not only within it: copies and looks need some too."""
    from mmdet_nanfix import locate
    made = batch(2)
    boxes(made, 1).zero_()

    def full(*args):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(locate, 'is_finite', full)
    assert locator(made).replay == 'the replay ran out of memory'
    monkeypatch.undo()
    monkeypatch.setattr(Transaction, 'begin', full)
    assert locator(made).replay == 'the replay ran out of memory'
