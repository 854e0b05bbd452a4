from __future__ import annotations

import pytest
from helpers.batches import batch
from helpers.replays import failing, record, walk

from mmdet_nanfix.diagnosis.findings import ReplayResult, ReplayStatus
from mmdet_nanfix.diagnosis.replay.batch_view import BatchView


def test_of_several_origins_the_one_without_which_nothing_fails():
    first, second = record(3, 'first'), record(8, 'second')

    def answer(request):
        return None if ('second', None) in request.mended else 'loss'

    found, requests = walk(BatchView(batch()), answer, [first, second])
    assert found.origin is second and found.others == [first]
    assert [request.mended for request in requests[:3]] == [
        {('first', None), ('second', None)}, {('first', None)},
        {('second', None)}]
    found, _ = walk(BatchView(batch()), lambda request: 'loss',
                    [first, second])
    assert found.origin is first and found.others == [second]


def test_a_layer_that_levels_share_is_one_place():
    origins = [record(index) for index in (3, 4, 5)]
    found, requests = walk(BatchView(batch()), lambda request: 'loss', origins)
    assert not any(request.mended for request in requests)
    assert found.origin is origins[0] and found.others == []
    other = record(9, 'other')
    _, requests = walk(BatchView(batch()), lambda request: 'loss',
                       [*origins, other])
    assert requests[0].mended == {('op', None), ('other', None)}


@pytest.mark.parametrize('first, said, status', [
    (ReplayResult(None), 'did not come again', ReplayStatus.NOT_REPRODUCED),
    (ReplayResult(error='ran out of memory'), 'ran out of memory',
     ReplayStatus.NOT_MADE)])
def test_without_a_result_nothing_is_blamed(first, said, status):
    found, requests = walk(BatchView(batch()), None, first=first)
    assert requests == [] and found.status is status
    assert said in found.replay and found.origin is None
    assert found.images is None


def test_what_was_at_hand_where_something_raised_must_be_tried():
    for helps in (False, True):
        found, requests = walk(
            BatchView(batch()), lambda request, helps=helps: None if (
                request.mended and helps) else 'raised',
            [record(3, 'harmless')], failed='raised')
        assert requests[0].mended == {('harmless', None)}
        assert (found.origin is not None) is helps
        assert found.replay is None


def test_origins_that_only_help_together():
    """Two areas that both go into a cost, a layer after a layer."""
    both = [record(3, 'first'), record(8, 'second')]
    found, _ = walk(BatchView(batch()), lambda request: (
        'grads' if len(request.mended) == 2 else 'raised'), both,
        failed='raised')
    # That something later fails then is another matter.
    assert found.origin is both[0] and found.others == [both[1]]
    assert 'first and second set to 0' in found.tests[0]


def test_what_shows_once_the_first_is_gone_is_tried_too():
    first, second = record(3, 'first'), record(8, 'second')

    def answer(request):
        if len(request.mended) == 1:
            return failing('raised', second)
        return None if request.mended else 'raised'

    found, requests = walk(BatchView(batch()), answer, [first],
                           failed='raised')
    assert found.origin is first and len(requests[1].mended) == 2


@pytest.mark.parametrize('kind', ['annotation', 'input', 'weight'])
def test_an_infinity_that_was_given_comes_after_what_can_be_tried(kind):
    given, real = record(-1, 'given', given=(kind, 'a')), record(5, 'real')
    found, _ = walk(BatchView(batch()), lambda request: (
        None if request.mended else 'loss'), [given, real])
    assert found.origin is real
    found, _ = walk(BatchView(batch()), lambda request: 'loss', [given, real])
    assert found.origin is given


def test_a_replay_that_fails_in_another_way_is_none():
    found, requests = walk(
        BatchView(batch()), None, raised='ValueError', first=failing(
            'raised', record(1), raised='KeyError'))
    assert requests == [] and found.replay == 'the replay raised KeyError'
    assert found.origin is None
    assert found.status is ReplayStatus.NOT_REPRODUCED
