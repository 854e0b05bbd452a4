from __future__ import annotations

import copy

import pytest
import torch
from helpers.batches import batch, boxes

from mmdet_nanfix.guard.state import BatchSnapshot


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
    many = BatchSnapshot({'lists': [[] for _ in range(30000)]})
    assert not many.is_restorable
