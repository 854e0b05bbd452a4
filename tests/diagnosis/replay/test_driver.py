from __future__ import annotations

import pytest
import torch
from helpers.guards import FakeRanks, parts_of
from torch import nn

from mmdet_nanfix.diagnosis.findings import Failure, ReplayResult
from mmdet_nanfix.diagnosis.replay.driver import MOST, ReplayDriver
from mmdet_nanfix.diagnosis.replay.request import ReplayRequest
from mmdet_nanfix.guard import CapturedForward
from mmdet_nanfix.guard.state import BatchSnapshot, Rng


def driver(ranks=None):
    return ReplayDriver(parts_of(nn.Linear(1, 1), ranks=ranks))


def asking(*requests, got):
    for request in requests:
        got.append((yield request))


def test_each_replay_is_made_and_its_result_comes_back():
    wanted = [ReplayRequest(probe=True), ReplayRequest(scale=2.)]
    made, got = [], []

    def run(request):
        made.append(request)
        return ReplayResult(Failure.LOSS, seen=len(made))

    driver().drive(asking(*wanted, got=got), run)
    assert made == wanted and [result.seen for result in got] == [1, 2]
    # One that asks for nothing is no replay.
    driver().drive(asking(got=got), run)
    assert len(made) == 2


def test_a_search_without_an_end_has_one():
    made, got = [], []
    driver().drive(
        asking(*[ReplayRequest()] * 99, got=got),
        lambda request: made.append(request) or ReplayResult())
    assert len(made) == MOST


@pytest.mark.parametrize('error, words', [
    (torch.cuda.OutOfMemoryError('CUDA out of memory'), 'ran out of memory'),
    (RuntimeError('DefaultCPUAllocator: out of memory'),
     'ran out of memory'),
    (KeyError('img'), "raised KeyError: 'img'")])
def test_a_replay_that_raises_is_a_result(error, words):
    got = []

    def run(request):
        raise error

    driver().drive(asking(ReplayRequest(), got=got), run)
    assert got == [ReplayResult(error=words)]


def test_all_make_the_replay_of_the_first_rank_that_asks():
    """Its own comes in another round."""
    theirs, made, got = ReplayRequest(precision=('heads', )), [], []
    shares = [theirs.shared()]
    ranks = FakeRanks(lambda flag: [1] if shares else [0] * flag,
                      lambda value, source: shares.pop() if source else value)

    def run(request):
        made.append(request)
        return ReplayResult(seen=len(made))

    own = ReplayRequest(scale=2., probe=True)
    driver(ranks).drive(asking(own, got=got), run)
    assert made == [theirs, own] and [result.seen for result in got] == [2]


def test_a_rank_that_asks_for_nothing_makes_those_of_the_others():
    theirs, made = ReplayRequest(scale=4.), []
    left = [1, 1]
    ranks = FakeRanks(lambda flag: [left.pop()] if left else [],
                      lambda value, source: theirs.shared())
    driver(ranks).drive(asking(got=[]), lambda request: (
        made.append(request) or ReplayResult()))
    assert made == [theirs] * 2


@pytest.mark.parametrize('unable, reason', [
    ([], None), ([1], 'another rank cannot')])
def test_a_forward_is_replayed_where_all_ranks_can(unable, reason):
    flags = []
    ranks = FakeRanks(lambda flag: flags.append(flag) or unable)
    forward = CapturedForward(BatchSnapshot({'x': torch.ones(1)}), Rng(),
                              False)
    assert driver(ranks).why_not(forward) == reason
    assert flags == [False]


def test_the_others_are_told_that_this_rank_cannot():
    flags = []
    ranks = FakeRanks(lambda flag: flags.append(flag) or [0] * flag)
    assert driver(ranks).why_not(None) == 'no batch was seen'
    assert flags == [True] and driver().why_not(None) == 'no batch was seen'
