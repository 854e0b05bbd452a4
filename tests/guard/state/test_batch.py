from __future__ import annotations

import copy

import pytest
import torch
from helpers.batches import batch, boxes, branches

from mmdet_nanfix.diagnosis.replay.batch_view import BatchSnapshot, BatchView


def test_what_a_model_does_to_a_batch_is_taken_back():
    made = batch()
    before = copy.deepcopy(made)
    kept = BatchSnapshot(made)
    sample = made['data_samples'][0]
    masks = sample.gt_instances.masks
    sample.gt_instances.masks = masks.pad((40, 40))
    sample.set_metainfo(dict(pad_shape=(40, 40)))
    made['inputs'] = torch.stack(made['inputs'])
    made['extra'] = 1
    assert kept.restore() is made
    assert set(made) == set(before) and isinstance(made['inputs'], list)
    assert sample.gt_instances.masks is masks
    assert 'pad_shape' not in sample
    assert set(sample.all_keys()) == set(
        before['data_samples'][0].all_keys())


@pytest.mark.parametrize('copies', [False, True])
def test_writing_in_place_is_seen_and_can_be_taken_back(copies):
    made = batch()
    kept = BatchSnapshot(made, copies)
    assert kept.is_restorable and not kept.written_to
    before = boxes(made, 0).clone()
    boxes(made, 0).mul_(2.)
    assert kept.written_to and kept.is_restorable is copies
    if copies:
        for _ in range(2):
            kept.restore()
            assert torch.equal(boxes(made, 0), before)
            boxes(made, 0).mul_(3.)


def test_pixels_are_not_copied():
    made = {'inputs': [torch.zeros(3, 300, 300)]}
    kept = BatchSnapshot(made, copies=True)
    assert kept.is_restorable
    made['inputs'][0].add_(1)
    assert not kept.is_restorable


def test_images_and_their_rows():
    images = BatchView(batch(3))
    assert [image.img_path for image in images.images] == [
        '0.jpg', '1.jpg', '2.jpg']
    assert images.size == 3 and images.at(1).img_id == 1
    assert images.at(3) is None
    assert images.at(1).to_image() == {
        'img_path': '1.jpg', 'img_id': 1, 'annotation': None}


def test_an_image_without_a_name_has_its_number():
    images = BatchView({'inputs': torch.ones(2, 3), 'labels': torch.ones(2)})
    assert [image.to_image()['img_path'] for image in images.images] == [
        'number 0', 'number 1']


def test_a_good_image_takes_the_place_of_another():
    made = batch(3)
    images = BatchView(made)
    other = images.without([images.at(1)])
    assert [sample.img_path for sample in other['data_samples']] == [
        '0.jpg', '0.jpg', '2.jpg']
    assert torch.equal(other['inputs'][1], made['inputs'][0])
    # Nothing is shared: a replay may write to it.
    assert other['inputs'][1] is not other['inputs'][0]
    assert made['data_samples'][1].img_path == '1.jpg'
    two = images.without([images.at(0), images.at(2)])
    assert {sample.img_path for sample in two['data_samples']} == {'1.jpg'}


def test_a_batch_of_one_takes_it_from_an_earlier_batch():
    images, earlier = BatchView(batch(1)), BatchView(batch(2))
    assert images.without(images.images) is None
    other = images.without(images.images, earlier)
    assert other['data_samples'][0].img_id == 0
    assert len(other['inputs']) == 1
    assert other['inputs'][0] is not earlier._batch['inputs'][0]


def test_a_stacked_batch():
    x = torch.arange(6.).view(3, 2)
    made = {'inputs': x, 'labels': torch.arange(3)}
    images = BatchView(made)
    other = images.without([images.at(2)])
    assert other['inputs'].tolist() == [[0., 1.], [2., 3.], [0., 1.]]
    assert other['labels'].tolist() == [0, 1, 0]
    assert x[2].tolist() == [4., 5.]


def test_views_of_one_image_go_together():
    images = BatchView(branches())
    assert [image.img_path for image in images.images] == [
        'a', 'b', 'c', 'd']
    assert images.at(0) is None and images.size is None
    (c, ) = [image for image in images.images if image.img_path == 'c']
    other = images.without([c])['data_samples']
    paths = {name: [sample.img_path for sample in samples]
             for name, samples in other.items()}
    assert paths == dict(sup=['a', 'b'], teacher=['d', 'd'],
                         student=['d', 'd'])


def test_bad_annotations_are_found_in_each_branch_and_repaired():
    made = branches()
    sample = made['data_samples']['student'][1]
    box = sample.gt_instances.bboxes
    getattr(box, 'tensor', box)[1] = torch.tensor([5., 5., 5., 9.])
    images = BatchView(made)
    ((group, bad), ) = images.bad_annotations(3)
    assert group == ('student', ) and (bad.sample, bad.index) == (1, 1)
    assert BatchView(images.repaired([(group, bad)])).bad_annotations(3) == []
    assert images.bad_annotations(3)


def test_the_worst_annotation_comes_first():
    made = batch()
    boxes(made, 0)[0] = torch.tensor([5., 5., 5., 9.])
    made['data_samples'][1].gt_instances.labels[1] = 7
    found = [bad.what for _, bad in BatchView(made).bad_annotations(3)]
    assert found == ['label 7 is outside of 0 to 2',
                     'box of zero size 0 x 4']


def test_rows_of_other_branches_are_left_alone():
    made = batch(2)
    first, second = made['data_samples']
    one, two = made['inputs']
    mixed = {'inputs': dict(sup=[one, None], teacher=[None, two]),
             'data_samples': dict(sup=[first, None], teacher=[None, second])}
    images = BatchView(mixed)
    assert [image.img_path for image in images.images] == ['0.jpg', '1.jpg']
    assert len(images.pixels()) == 2
    # Nothing else is in its branch, but in an earlier batch.
    assert images.without(images.images[:1]) is None
    other = images.without(images.images[:1], BatchView(mixed))
    assert other['data_samples']['sup'][1] is None
    assert images.bad_annotations(3) == []


def test_tensors_that_cannot_be_written_to_here():
    with torch.inference_mode():
        made = {'inputs': torch.ones(2, 3)}
    leaf = torch.ones(2, requires_grad=True)
    made['leaf'] = leaf
    made['wide'] = torch.ones(1).expand(4)
    kept = BatchSnapshot(made, copies=True)
    assert kept.is_restorable
    with torch.no_grad():
        leaf.mul_(3.)
    kept.restore()
    assert leaf.tolist() == [1., 1.] and leaf.requires_grad


def test_a_batch_of_very_many_objects_is_not_half_kept():
    assert BatchSnapshot({'numbers': list(range(10 ** 6))}).is_restorable
    assert not BatchSnapshot({'lists': [[] for _ in range(30000)]}).is_restorable
