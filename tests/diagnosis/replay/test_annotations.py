from __future__ import annotations

import math

import pytest
from helpers.annotations import GOOD, sample

from mmdet_nanfix.diagnosis.replay.annotations import (
    AnnotationFault,
    bad_annotations,
    repaired,
)


@pytest.mark.parametrize('wrap', [False, True])
@pytest.mark.parametrize('box, label, what', [
    ([1., 1., math.nan, 5.], 0, 'not finite'),
    ([1., 1., math.inf, 5.], 0, 'not finite'),
    ([1., 1., 1., 5.], 0, 'zero size 0 x 4'),
    ([5., 1., 1., 5.], 0, 'negative size -4 x 4'),
    (GOOD, 3, 'label 3 is outside of 0 to 2'),
    (GOOD, -1, 'label -1'),
])
def test_what_is_bad(box, label, what, wrap):
    samples = [sample([GOOD]), sample([GOOD, box], [1, label], wrap)]
    (found, ) = bad_annotations(samples, num_classes=3)
    assert (found.sample, found.index, found.label) == (1, 1, label)
    assert what in found.what
    assert (found.fault is AnnotationFault.LABEL) is (
        what.startswith('label'))
    image = found.to_image()
    assert (image['img_path'], image['img_id']) == ('a.jpg', 7)
    assert image['annotation']['index'] == 1
    mended = repaired(samples, [found])
    assert [len(item.gt_instances) for item in mended] == [1, 2]
    assert not list(bad_annotations(mended, num_classes=3))
    assert list(bad_annotations(samples, num_classes=3))


def test_an_image_without_a_good_annotation_is_repaired():
    samples = [sample([[1., 1., 1., 5.]], [9])]
    bad = list(bad_annotations(samples, num_classes=3))
    assert not list(bad_annotations(repaired(samples, bad), 3))
    samples[0].gt_instances.pop('labels')
    bad = list(bad_annotations(samples, num_classes=3))
    assert not list(bad_annotations(repaired(samples, bad), 3))


@pytest.mark.parametrize('samples', [
    None, 3, [], [object()], [sample([])], [sample([GOOD, GOOD])]])
def test_what_is_fine_or_unknown(samples):
    assert list(bad_annotations(samples, num_classes=3)) == []


def test_labels_above_are_unchecked_without_a_number_of_classes():
    assert list(bad_annotations([sample([GOOD], [99])])) == []
