from __future__ import annotations

import pytest

from mmdet_nanfix.guard.rules import StopRule


def test_stop_after_consecutive_skips():
    rule = StopRule(max_consecutive=3)
    walked = [rule.update(skipped) for skipped in (
        False, True, True, False, True, True)]
    assert walked == [None] * 6
    assert (rule.consecutive, rule.total, rule.steps) == (2, 4, 6)
    assert '3 optimizer steps in a row' in rule.update(True)


def test_stop_after_too_many_recent_skips():
    rule = StopRule(max_consecutive=20)
    for _ in range(40):
        assert rule.update(True) is None
        assert rule.update(False) is None
    assert '41 of the last 81' in rule.update(True)
    # Old skips are forgotten.
    rule = StopRule(max_consecutive=20)
    for _ in range(300):
        assert rule.update(True) is None
        for _ in range(5):
            assert rule.update(False) is None


def test_none_never_stops():
    rule = StopRule(max_consecutive=None)
    assert {rule.update(True) for _ in range(1000)} == {None}
    assert rule.consecutive == rule.total == rule.steps == 1000


@pytest.mark.parametrize('bad, error', [
    (0, ValueError), (-1, ValueError), (1.5, TypeError), ('9', TypeError),
    (True, TypeError)])
def test_impossible_stop_rule(bad, error):
    with pytest.raises(error, match='max_consecutive'):
        StopRule(max_consecutive=bad)


def test_counters_round_trip():
    rule = StopRule()
    for skipped in (True, False, True, True):
        rule.update(skipped)
    resumed = StopRule()
    resumed.load_state_dict(rule.state_dict())
    assert (resumed.consecutive, resumed.total, resumed.steps) == (2, 3, 4)
