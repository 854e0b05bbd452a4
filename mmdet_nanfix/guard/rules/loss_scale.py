"""Adapt the loss scale: plain rules, without a framework.

A step is described by two booleans (were the losses finite, were the
gradients finite); what comes back is the scale of the next.
"""
from __future__ import annotations

import dataclasses
import math
from numbers import Integral, Real
from typing import Any, Mapping

__all__ = ['DEFAULT_START', 'HIGH_START', 'LossScale', 'LossScaleSettings']

HIGH_START = 512.
DEFAULT_START = 256.


@dataclasses.dataclass
class LossScaleSettings:
    """Settings of the dynamic loss scale.

    Attributes:
        init_scale: Start value. 512 and more is lowered to 256 unless
            ``allow_high_start``.
        growth_factor: Factor of a growth, above 1.
        backoff_factor: Factor of a backoff, in (0, 1).
        growth_interval: Good steps in a row before a growth. ``None``: 500
            until the first overflow and below the start, else 2000.
        min_scale: Floor. A scale below 1 flushes half gradients to zero.
        max_scale: Ceiling.
        hysteresis: Overflows in a row that are borne before a backoff; 1
            backs off at the first.
        allow_high_start: Leave a start of 512 or more as it is.
        enabled: ``False`` keeps the scale at 1 (``GradScaler``'s switch).
    """

    init_scale: float = DEFAULT_START
    growth_factor: float = 2.
    backoff_factor: float = 0.5
    growth_interval: int | None = None
    min_scale: float = 1.
    max_scale: float = 65536.
    hysteresis: int = 1
    allow_high_start: bool = False
    enabled: bool = True

    @classmethod
    def from_arguments(cls, loss_scale: Any,
                       overrides: Mapping[str, Any]) -> LossScaleSettings:
        """Read what a config gives.

        Args:
            loss_scale: ``'dynamic'``, a number (the start value), or a dict
                of the attributes above.
            overrides: Attributes that win over ``loss_scale``. (``--amp``
                overwrites ``loss_scale``, so a config needs another place.)

        Raises:
            TypeError: Another type, or a name that does not exist.
            ValueError: A value that no loss scale can have.
        """
        if isinstance(loss_scale, str) and loss_scale == 'dynamic':
            given: dict[str, Any] = {}
        elif isinstance(loss_scale, Real) and not isinstance(
                loss_scale, bool):
            given = {'init_scale': loss_scale}
        elif isinstance(loss_scale, Mapping):
            given = dict(loss_scale)
        else:
            kind = ValueError if isinstance(loss_scale, str) else TypeError
            raise kind("Expected argument `loss_scale` to be 'dynamic', a "
                       f'number or a dict, but got {loss_scale!r}')
        given.update(overrides)
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise TypeError(
                    f'`loss_scale` has no setting {name!r}; accepted are '
                    f'{", ".join(names)}')
        # A start outside the default band moves the band: such a start was
        # legal in GradScaler. A band that was given is a promise.
        settings = cls(**given)
        settings._check_types()
        if 'min_scale' not in given:
            settings.min_scale = min(settings.min_scale, settings.init_scale)
        if 'max_scale' not in given and settings.allow_high_start:
            settings.max_scale = max(settings.max_scale, settings.init_scale)
        settings._check_ranges()
        return settings

    def _check_types(self) -> None:
        for name in ('init_scale', 'growth_factor', 'backoff_factor',
                     'min_scale', 'max_scale'):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f'Expected argument `{name}` to be a number, '
                                f'but got {value!r}')
            try:
                setattr(self, name, float(value))
            except OverflowError:
                setattr(self, name, math.inf)
        for name in ('growth_interval', 'hysteresis'):
            value = getattr(self, name)
            if value is None and name == 'growth_interval':
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f'Expected argument `{name}` to be an int, '
                                f'but got {value!r}')
            setattr(self, name, int(value))
        for name in ('allow_high_start', 'enabled'):
            if getattr(self, name) not in (False, True):
                raise TypeError(f'Expected argument `{name}` to be a bool, '
                                f'but got {getattr(self, name)!r}')

    def _check_ranges(self) -> None:
        ok = {
            # The scale is kept in fp32, and so is its reciprocal.
            'init_scale': (2.**-100 <= self.init_scale <= 2.**100,
                           'a number from 2**-100 to 2**100'),
            'growth_factor': (1 < self.growth_factor < math.inf,
                              'a finite number above 1'),
            'backoff_factor': (0 < self.backoff_factor < 1,
                               'a number between 0 and 1'),
            'min_scale': (2.**-100 <= self.min_scale <= 2.**100,
                          'a number from 2**-100 to 2**100'),
            'max_scale': (self.min_scale <= self.max_scale <= 2.**100,
                          'a number from `min_scale` '
                          f'({self.min_scale:g}) to 2**100'),
            'growth_interval': (self.growth_interval is None
                                or self.growth_interval > 0,
                                'an int above 0, or None'),
            'hysteresis': (self.hysteresis > 0, 'an int above 0'),
        }
        for name, (good, wanted) in ok.items():
            if not good:
                raise ValueError(f'Expected argument `{name}` to be {wanted},'
                                 f' but got {getattr(self, name)!r}')

    def start(self) -> tuple[float, str | None]:
        """Start value, and one sentence where it is not the one asked for."""
        if not self.enabled:
            return 1., None
        scale = self.init_scale
        why = None
        if scale >= HIGH_START and not self.allow_high_start:
            scale = DEFAULT_START
            why = (f'loss scale starts at {DEFAULT_START:g} instead of '
                   f'{self.init_scale:g} (allow_high_start=True keeps it)')
        clamped = min(max(scale, self.min_scale), self.max_scale)
        if clamped != scale:
            why = (f'loss scale starts at {clamped:g} instead of '
                   f'{self.init_scale:g}: it must lie between min_scale '
                   f'{self.min_scale:g} and max_scale {self.max_scale:g}')
        return clamped, why


class LossScale:
    """A dynamic loss scale.

    It backs off when gradients overflow although the losses were finite,
    never below ``min_scale``, and grows after ``growth_interval`` good steps
    in a row, never above ``max_scale``. A loss that is not finite leaves it
    as it is: the forward has not seen the scale.

    Args:
        settings: The rules.

    Attributes:
        scale: Current value.
        good_steps: Good steps since the last change of the scale.
        bad_steps: Overflows since the last good step or backoff.
        overflowed: Whether the scale has ever been too high.
        note: One sentence where the start is not the one asked for.
    """

    def __init__(self, settings: LossScaleSettings) -> None:
        self.settings = settings
        self.scale, self.note = settings.start()
        self.good_steps = 0
        self.bad_steps = 0
        self.overflowed = False

    def __str__(self) -> str:
        """The rules, for one line at the start of a run."""
        rules = self.settings
        if not rules.enabled:
            return 'no loss scale'
        interval = rules.growth_interval or (
            '500 until the first overflow and below the start, else 2000')
        return (f'loss scale {self.scale:g} in {rules.min_scale:g} to '
                f'{rules.max_scale:g}, backoff {rules.backoff_factor:g}, '
                f'growth {rules.growth_factor:g} after {interval} good steps,'
                f' hysteresis {rules.hysteresis}')

    def update(self, losses_finite: bool, grads_finite: bool) -> float:
        """Take in one optimizer step and return the scale of the next."""
        if not self.settings.enabled:
            return self.scale
        if losses_finite and grads_finite:
            self._grow()
        else:
            self.good_steps = 0
            if losses_finite:
                self._back_off()
        return self.scale

    def fit(self, scale: float) -> float:
        """Take in an overflow after which a scale was found that fits.

        Args:
            scale: The highest that was seen to fit.

        Returns:
            The scale of the next step: this one, once ``hysteresis``
            overflows have come in a row.
        """
        before = self.scale
        self.good_steps = 0
        self._back_off()
        if self.scale != before:
            self.scale = min(before, max(scale, self.settings.min_scale))
        return self.scale

    def _interval(self) -> int:
        if self.settings.growth_interval is not None:
            return self.settings.growth_interval
        quick = not self.overflowed or self.scale < self.settings.start()[0]
        return 500 if quick else 2000

    def _grow(self) -> None:
        self.bad_steps = 0
        self.good_steps += 1
        if self.good_steps >= self._interval():
            self.good_steps = 0
            self.scale = min(self.scale * self.settings.growth_factor,
                             self.settings.max_scale)

    def _back_off(self) -> None:
        self.overflowed = True
        self.bad_steps += 1
        if self.bad_steps >= self.settings.hysteresis:
            self.bad_steps = 0
            self.scale = max(self.scale * self.settings.backoff_factor,
                             self.settings.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers under ``GradScaler``'s five keys and two of ours.

        ``scale``, ``growth_factor``, ``backoff_factor``,
        ``growth_interval``, ``_growth_tracker`` (good steps),
        ``nanfix_overflowed`` and ``nanfix_bad_steps``. Where no scale is in
        use, the one that half precision would start at.
        """
        return {
            'scale': self.scale if self.settings.enabled else DEFAULT_START,
            'growth_factor': self.settings.growth_factor,
            'backoff_factor': self.settings.backoff_factor,
            'growth_interval': self._interval(),
            '_growth_tracker': self.good_steps,
            'nanfix_overflowed': int(self.overflowed),
            'nanfix_bad_steps': self.bad_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Load progress; the rules stay those of the config.

        Args:
            state: From :meth:`state_dict`, from a ``GradScaler``, or empty
                (what a disabled ``GradScaler`` stores).

        Returns:
            One sentence where the stored scale could not be used as it is.
        """
        self.good_steps = int(state.get('_growth_tracker', 0))
        self.bad_steps = int(state.get('nanfix_bad_steps', 0))
        self.overflowed = bool(state.get('nanfix_overflowed', False))
        if 'scale' not in state or not self.settings.enabled:
            return None
        stored = float(state['scale'])
        low, high = self.settings.min_scale, self.settings.max_scale
        if math.isfinite(stored) and low <= stored <= high:
            self.scale = stored
            return None
        self.scale = min(max(stored, low), high) if stored > 0 and (
            math.isfinite(stored)) else self.settings.start()[0]
        self.good_steps = 0
        return (f'the checkpoint holds a loss scale of {stored:g}, outside '
                f'{low:g} to {high:g}: going on at {self.scale:g}')
