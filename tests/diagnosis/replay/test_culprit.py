from __future__ import annotations

import math

import pytest
import torch
from helpers.batches import batch, boxes
from helpers.replays import record, walk

from mmdet_nanfix.diagnosis.findings import ReplayResult
from mmdet_nanfix.diagnosis.replay.batch_view import BatchView
from mmdet_nanfix.diagnosis.replay.op_record import CallSite


def culprits(names, made):
    """Fails while one of the images is in the batch."""

    def answer(request):
        data = made if request.batch is None else request.batch
        here = {sample.img_path for sample in data['data_samples']}
        return 'loss' if here & set(names) else None

    return answer


@pytest.mark.parametrize('count', [1, 2, 3, 4, 5, 8, 16])
def test_any_one_image_of_any_batch_is_found(count):
    made = batch(count)
    for index in range(count):
        name = f'{index}.jpg'
        earlier = batch(2)
        earlier['data_samples'][0].set_metainfo(dict(img_path='good'))
        found, requests = walk(BatchView(made), culprits([name], made),
                               last_good=BatchView(earlier))
        assert [image['img_path'] for image in found.images] == [name]
        assert len(requests) <= 6
        assert all(len(request.batch['inputs']) == count
                   for request in requests)


@pytest.mark.parametrize('count', [1, 2, 5, 16])
def test_where_all_images_fail_none_is_blamed(count):
    made = batch(count)
    found, requests = walk(BatchView(made), lambda request: 'loss',
                           last_good=BatchView(batch(2)))
    assert found.images is None and len(requests) <= 6


def test_a_row_of_the_origin_is_suspected_first():
    made = batch(8)
    origin = record(3, rows=([6], 8))
    found, requests = walk(BatchView(made), culprits(['6.jpg'], made),
                           [origin])
    # The second shows that it stays with another of the others replaced.
    assert found.images[0]['img_path'] == '6.jpg' and len(requests) == 2
    assert found.origin is origin and found.tests
    site = CallSite(image=2)
    found, requests = walk(BatchView(made), culprits(['2.jpg'], made),
                           [record(1, site=site)])
    assert len(requests) == 2


def test_a_hint_that_leads_astray_costs_one_replay():
    made = batch(8)
    found, requests = walk(BatchView(made), culprits(['2.jpg'], made),
                           [record(3, rows=([6], 8))])
    assert found.images[0]['img_path'] == '2.jpg' and len(requests) <= 6


@pytest.mark.parametrize('kind', ['weight', 'buffer'])
def test_bad_weights_and_buffers_need_no_more(kind):
    found, requests = walk(BatchView(batch()), lambda request: 'loss', [
        record(-1, given=(kind, 'a'))])
    assert requests == [] and found.images is None


def test_a_bad_pixel_needs_no_more():
    made = batch()
    made['inputs'][1] = made['inputs'][1].float()
    made['inputs'][1][0, 3, 3] = math.inf
    found, requests = walk(BatchView(made), lambda request: 'loss', [
        record(-1, given=('input', '1.jpg'))])
    assert requests == [] and found.images[0]['img_path'] == '1.jpg'


def zero_boxes(made, *places):
    for row, index in places:
        boxes(made, row)[index] = torch.tensor([5., 5., 5., 9.])
    return BatchView(made)


def fails_with(row, index):
    """Fails while that box has no width."""

    def answer(request):
        if request.batch is None:
            return 'loss'
        box = boxes(request.batch, row)[index]
        return 'loss' if box[0] == box[2] else None

    return answer


def test_the_annotation_to_blame_is_the_one_that_helps():
    found, _ = walk(zero_boxes(batch(), (1, 1)), fails_with(1, 1))
    (image, ) = found.images
    assert image['img_path'] == '1.jpg'
    assert image['annotation']['index'] == 1
    found, _ = walk(zero_boxes(batch(), (0, 0), (1, 1)), fails_with(1, 1))
    (image, ) = found.images
    assert (image['img_path'], image['annotation']['index']) == ('1.jpg', 1)


def test_an_annotation_that_looks_bad_and_harms_nobody_is_not_blamed():
    made = batch()
    found, _ = walk(zero_boxes(made, (0, 0)), lambda request: 'loss')
    assert found.images is None
    found, _ = walk(zero_boxes(made, (0, 0)), culprits(['1.jpg'], made))
    (image, ) = found.images
    assert (image['img_path'], image['annotation']) == ('1.jpg', None)


def test_memory_that_runs_out_later_ends_the_search():
    origin = record(3)
    found, requests = walk(
        BatchView(batch(8)),
        lambda request: ReplayResult(error='ran out of memory'), [origin])
    assert len(requests) == 1
    assert found.origin is origin and found.images is None
    assert 'ran out of memory' in found.tests[0]


def test_on_several_ranks_an_annotation_that_is_not_finite_is_named():
    made = batch(2)
    boxes(made, 1)[1] = math.nan
    boxes(made, 0)[0] = torch.tensor([5., 5., 5., 9.])
    found, requests = walk(BatchView(made), None, [
        record(-1, given=('annotation', '?'))], alone=False)
    assert requests == []
    (image, ) = found.images
    assert image['img_path'] == '1.jpg' and image['annotation']['index'] == 1


def test_a_failure_that_hangs_on_what_was_drawn_is_no_images_fault():
    """It goes away whatever is put in, and whichever place it is put in."""
    found, _ = walk(BatchView(batch(2)), lambda request: None)
    assert found.images is None
