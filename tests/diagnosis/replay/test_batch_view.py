from __future__ import annotations

import torch
from helpers.batches import batch, boxes, branches

from mmdet_nanfix.diagnosis.replay.batch_view import BatchView


def test_images_and_their_rows():
    view = BatchView(batch(3))
    assert [image.img_path for image in view.images] == [
        '0.jpg', '1.jpg', '2.jpg']
    assert view.size == 3 and view.at(1).img_id == 1
    assert view.at(3) is None
    assert view.at(1).to_image() == {
        'img_path': '1.jpg', 'img_id': 1, 'annotation': None}


def test_an_image_without_a_name_has_its_number():
    view = BatchView({'inputs': torch.ones(2, 3), 'labels': torch.ones(2)})
    assert [image.to_image()['img_path'] for image in view.images] == [
        'number 0', 'number 1']


def test_a_good_image_takes_the_place_of_another():
    made = batch(3)
    view = BatchView(made)
    other = view.replacing([view.at(1)])
    assert [sample.img_path for sample in other['data_samples']] == [
        '0.jpg', '0.jpg', '2.jpg']
    assert torch.equal(other['inputs'][1], made['inputs'][0])
    # Nothing is shared: a replay may write to it.
    assert other['inputs'][1] is not other['inputs'][0]
    assert made['data_samples'][1].img_path == '1.jpg'
    two = view.replacing([view.at(0), view.at(2)])
    assert {sample.img_path for sample in two['data_samples']} == {'1.jpg'}


def test_a_batch_of_one_takes_it_from_an_earlier_batch():
    view, two = BatchView(batch(1)), batch(2)
    assert view.replacing(view.images) is None
    other = view.replacing(view.images, BatchView(two))
    assert other['data_samples'][0].img_id == 0
    assert len(other['inputs']) == 1
    assert other['inputs'][0] is not two['inputs'][0]


def test_a_stacked_batch():
    x = torch.arange(6.).view(3, 2)
    made = {'inputs': x, 'labels': torch.arange(3)}
    view = BatchView(made)
    other = view.replacing([view.at(2)])
    assert other['inputs'].tolist() == [[0., 1.], [2., 3.], [0., 1.]]
    assert other['labels'].tolist() == [0, 1, 0]
    assert x[2].tolist() == [4., 5.]


def test_views_of_one_image_go_together():
    view = BatchView(branches())
    assert [image.img_path for image in view.images] == [
        'a', 'b', 'c', 'd']
    assert view.at(0) is None and view.size is None
    (c, ) = [image for image in view.images if image.img_path == 'c']
    other = view.replacing([c])['data_samples']
    paths = {name: [sample.img_path for sample in samples]
             for name, samples in other.items()}
    assert paths == dict(sup=['a', 'b'], teacher=['d', 'd'],
                         student=['d', 'd'])


def test_bad_annotations_are_found_in_each_branch_and_repaired():
    made = branches()
    sample = made['data_samples']['student'][1]
    box = sample.gt_instances.bboxes
    getattr(box, 'tensor', box)[1] = torch.tensor([5., 5., 5., 9.])
    view = BatchView(made)
    ((group, bad), ) = view.bad_annotations(3)
    assert group == ('student', ) and (bad.sample, bad.index) == (1, 1)
    assert BatchView(view.repaired([(group, bad)])).bad_annotations(3) == []
    assert view.bad_annotations(3)


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
    view = BatchView(mixed)
    assert [image.img_path for image in view.images] == ['0.jpg', '1.jpg']
    assert len(view.pixels()) == 2
    # Nothing else is in its branch, but in an earlier batch.
    assert view.replacing(view.images[:1]) is None
    other = view.replacing(view.images[:1], BatchView(mixed))
    assert other['data_samples']['sup'][1] is None
    assert view.bad_annotations(3) == []


def test_what_a_batch_has_given_by_its_names():
    made = batch(2)
    view = BatchView(made)
    (_, first), (_, second) = view.pixels()
    label = made['data_samples'][0].gt_instances.labels
    assert [(kind, name) for kind, name, _ in view.given(
        [label, second, first])] == [
            ('annotation', 'an annotation'), ('input', '1.jpg'),
            ('input', '0.jpg')]
    # Of pixels in one memory no image can be told.
    stacked = {'inputs': torch.ones(2, 3, 4, 4)}
    ((kind, name, _), ) = BatchView(stacked).given([stacked['inputs']])
    assert (kind, name) == ('input', 'the batch')


def test_pixels_are_clipped_in_a_copy():
    made = {'inputs': torch.tensor([[-5., 300.], [-5., 300.]])}
    made['inputs'][0, 0] = float('nan')
    view = BatchView(made)
    other = view.with_pixels([view.at(0)], 0., 255.)
    assert other['inputs'].tolist() == [[0., 255.], [-5., 300.]]
    assert made['inputs'][0, 1] == 300.
