from __future__ import annotations

import pytest

from mmdet_nanfix.guard.rules import Fp32Promotions


@pytest.mark.parametrize('saved, stays', [
    ([1, 2], False), ([1, 2, 3], True), ([1, 500, 1000], True),
    ([1, 500, 1001], False), ([1, 900, 1800, 2700], False),
    ([1, 1500, 1600, 1700], True)])
def test_three_within_a_thousand(saved, stays):
    parts = Fp32Promotions()
    told = [parts.record_rescue('head', iteration) for iteration in saved]
    assert (parts.names == ['head']) is stays
    assert sum(told) == int(stays) and told[-1] is stays


def test_each_part_counts_for_itself():
    parts = Fp32Promotions(['neck'])
    for iteration in range(2):
        parts.record_rescue('a', iteration)
        parts.record_rescue('b', iteration)
    assert parts.names == ['neck']
    assert parts.record_rescue('b', 2) and parts.names == ['neck', 'b']
    # What stays is not told again.
    assert not parts.record_rescue('b', 3)
    assert not parts.record_rescue('neck', 4)


def test_a_round_trip_in_plain_numbers():
    parts = Fp32Promotions(['neck'])
    for iteration in (7, 8):
        parts.record_rescue('roi_head.bbox_head.1', iteration)
    state = parts.state_dict()
    # What the config says is the config's to say again.
    assert state == {
        'nanfix_fp32_saved/0/roi_head.bbox_head.1': 7,
        'nanfix_fp32_saved/1/roi_head.bbox_head.1': 8}
    again = Fp32Promotions()
    again.load_state_dict({'scale': 4., 'nanfix_saved': 3, **state})
    assert again.state_dict() == state
    assert again.record_rescue('roi_head.bbox_head.1', 9)
    assert again.state_dict()['nanfix_fp32/roi_head.bbox_head.1'] == 1
    resumed = Fp32Promotions(['neck'])
    resumed.load_state_dict({**again.state_dict(), 'nanfix_fp32/off': 0})
    assert resumed.names == ['neck', 'roi_head.bbox_head.1']
    assert resumed.drop_unknown({'neck'}) == ['roi_head.bbox_head.1']
    assert resumed.names == ['neck'] and resumed.drop_unknown(()) == []
    # A checkpoint from before the package knows nothing.
    fresh = Fp32Promotions()
    fresh.load_state_dict({})
    assert fresh.names == [] and fresh.state_dict() == {}
