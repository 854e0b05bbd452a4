from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdet_nanfix.guard.rules import LossScale, LossScaleSettings

GOOD = (True, True)
OVERFLOW = (True, False)
BAD_LOSS = (False, False)


def scale(loss_scale='dynamic', **overrides):
    return LossScale(LossScaleSettings.from_arguments(loss_scale, overrides))


def walk(policy, *steps):
    return [policy.update(*step) for step in steps]


def test_good_bad_bad_good_limit():
    policy = scale(min_scale=100., growth_interval=2)
    assert policy.scale == 256
    assert walk(policy, GOOD, OVERFLOW, OVERFLOW, GOOD, GOOD, GOOD) == [
        256, 128, 100, 100, 200, 200]


def test_a_bad_loss_says_nothing_about_the_scale():
    policy = scale(growth_interval=2)
    assert walk(policy, GOOD, BAD_LOSS, GOOD) == [256, 256, 256]
    # ... but it is no good step: growth starts to count anew.
    assert walk(policy, GOOD) == [512]


def test_floor_and_ceiling():
    policy = scale()
    assert walk(policy, *[OVERFLOW] * 200)[-1] == 1
    policy = scale(growth_interval=1, max_scale=1000.)
    assert walk(policy, *[GOOD] * 20)[-1] == 1000


def test_growth_is_quick_until_the_first_overflow():
    policy = scale()
    assert walk(policy, *[GOOD] * 500)[-1] == 512
    walk(policy, OVERFLOW)
    assert walk(policy, *[GOOD] * 1999)[-1] == 256
    assert walk(policy, GOOD) == [512]


def test_hysteresis_bears_a_first_overflow():
    policy = scale(hysteresis=2)
    assert walk(policy, OVERFLOW, GOOD, OVERFLOW, OVERFLOW, OVERFLOW) == [
        256, 256, 256, 128, 128]


@pytest.mark.parametrize('given_scale, start, lowered', [
    ('dynamic', 256, False),
    (64, 64, False),
    (300., 300, False),
    (512, 256, True),
    (512., 256, True),
    (dict(init_scale=65536.), 256, True),
    (dict(init_scale=65536., allow_high_start=True), 65536, False),
    (dict(init_scale=2.**20, allow_high_start=True), 2**20, False),
    (dict(init_scale=0.5), 0.5, False),
    (dict(enabled=False), 1, False),
    (dict(init_scale=64, max_scale=32), 32, True),
])
def test_start(given_scale, start, lowered):
    policy = scale(given_scale)
    assert policy.scale == start
    assert (policy.note is not None) == lowered


def test_overrides_win():
    assert scale('dynamic', init_scale=64.).scale == 64
    assert scale(512., init_scale=64.).scale == 64


def test_disabled_stays_at_one():
    policy = scale(dict(enabled=False))
    assert walk(policy, OVERFLOW, GOOD, BAD_LOSS) == [1, 1, 1]


@pytest.mark.parametrize('bad, error, named', [
    ('static', ValueError, 'static'),
    (None, TypeError, 'None'),
    (True, TypeError, 'True'),
    ([512], TypeError, '512'),
    (-1., ValueError, 'init_scale'),
    (math.inf, ValueError, 'init_scale'),
    (math.nan, ValueError, 'init_scale'),
    (dict(init_scale=0), ValueError, 'init_scale'),
    (dict(backoff_factor=-.5), ValueError, 'backoff_factor'),
    (dict(backoff_factor=1.), ValueError, 'backoff_factor'),
    (dict(growth_factor=1), ValueError, 'growth_factor'),
    (dict(growth_interval=0), ValueError, 'growth_interval'),
    (dict(growth_interval=1.5), TypeError, 'growth_interval'),
    (dict(min_scale=8., max_scale=4.), ValueError, 'max_scale'),
    (dict(hysteresis=0), ValueError, 'hysteresis'),
    (dict(init_scale='256'), TypeError, 'init_scale'),
    (dict(allow_high_start=2), TypeError, 'allow_high_start'),
    (dict(inital_scale=1.), TypeError, 'inital_scale'),
])
def test_impossible_settings(bad, error, named):
    with pytest.raises(error, match=named) as caught:
        scale(bad)
    assert '\n' not in str(caught.value)


@given(st.lists(st.sampled_from([GOOD, OVERFLOW, BAD_LOSS])),
       st.integers(1, 5), st.integers(1, 4))
def test_scale_stays_a_finite_power_of_two_in_its_band(steps, interval, hyst):
    policy = scale(growth_interval=interval, hysteresis=hyst, max_scale=4096.)
    for value in walk(policy, *steps):
        assert 1 <= value <= 4096 and math.log2(value).is_integer()


@given(st.lists(st.sampled_from([GOOD, OVERFLOW, BAD_LOSS])),
       st.lists(st.sampled_from([GOOD, OVERFLOW, BAD_LOSS])))
def test_state_round_trip(before, after):
    policy = scale(growth_interval=3, hysteresis=2)
    walk(policy, *before)
    resumed = scale(growth_interval=3, hysteresis=2)
    assert resumed.load_state_dict(policy.state_dict()) is None
    assert walk(policy, *after) == walk(resumed, *after)
    assert all(type(value) in (int, float)
               for value in policy.state_dict().values())


@pytest.mark.parametrize('stored, kept', [
    (65536., 65536), (0., 256), (math.inf, 256), (math.nan, 256),
    (1e-30, 1), (2.**30, 65536)])
def test_a_collapsed_scale_is_repaired(stored, kept):
    policy = scale()
    complaint = policy.load_state_dict({'scale': stored})
    assert policy.scale == kept
    assert (complaint is None) == (stored == kept)


def test_state_of_a_disabled_scaler_is_empty():
    policy = scale()
    assert policy.load_state_dict({}) is None
    assert policy.scale == 256


def test_growth_is_quick_again_below_the_start():
    scale = LossScale(LossScaleSettings(init_scale=64.))
    steps = []

    def until_it_moves():
        before, count = scale.scale, 0
        while scale.scale == before:
            scale.update(losses_finite=True, grads_finite=True)
            count += 1
        return count

    steps.append(until_it_moves())
    scale.update(losses_finite=True, grads_finite=False)
    scale.update(losses_finite=True, grads_finite=False)
    assert scale.scale == 32
    steps.append(until_it_moves())
    assert scale.scale == 64
    steps.append(until_it_moves())
    assert steps == [500, 500, 2000]


def test_the_rules_in_one_line():
    assert str(LossScale(LossScaleSettings(enabled=False))) == (
        'no loss scale')
    assert 'loss scale 256 in 1 to 65536' in str(
        LossScale(LossScaleSettings()))


def test_without_a_scale_the_start_is_stored():
    """A run in half precision that goes on from here needs one."""
    state = LossScale(LossScaleSettings(enabled=False)).state_dict()
    assert state['scale'] == 256


@pytest.mark.parametrize('hysteresis, fits, wanted', [
    (1, [64.], 64.), (1, [.25], 1.), (1, [512.], 256.),
    (2, [64.], 256.), (2, [64., 32.], 32.)])
def test_a_scale_that_fits_is_taken_once_overflows_are_in_a_row(
        hysteresis, fits, wanted):
    scale = LossScale(LossScaleSettings(hysteresis=hysteresis))
    for fit in fits:
        scale.fit(fit)
    assert scale.scale == wanted and scale.overflowed
    # A good step in between begins anew.
    scale = LossScale(LossScaleSettings(hysteresis=2))
    scale.fit(64.)
    scale.update(True, True)
    scale.fit(64.)
    assert scale.scale == 256.
