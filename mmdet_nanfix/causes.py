"""Why a step failed: the verdict on what counterfactual replays have shown.

A replay changes one thing and leaves weights, buffers, batch and random
numbers as they were. What it showed is a :class:`Replay`; what was read off
the state of the run is a :class:`Reading`. A verdict is the first rule that
holds, and its evidence is what that rule has looked at: with another outcome
of one of these replays it is another verdict.
"""
from __future__ import annotations

import dataclasses
from typing import Callable, Optional, Sequence

__all__ = ['DOMINANT', 'Facts', 'GROWTH', 'Reading', 'Replay', 'SHARE',
           'verdict']

#: Loss or gradient norm against the median of the steps before.
GROWTH = 10.
#: Length of the last update against that of all weights.
SHARE = 0.5
#: Value of one loss term against all others together, and the least that
#: is blamed: every loss of about 1 is one to train with.
DOMINANT = 1000.


@dataclasses.dataclass
class Replay:
    """What one replay has shown.

    Attributes:
        gone: Whether the failure did not come.
        words: What was changed and what came of it, in one clause.
    """

    gone: bool
    words: str


@dataclasses.dataclass
class Reading:
    """What the state of the run says, without a replay.

    Attributes:
        bad: Whether it is a reason for the failure.
        words: In one clause, with numbers.
    """

    bad: bool
    words: str


@dataclasses.dataclass
class Facts:
    """All that a verdict may look at.

    Attributes:
        failed: How the first replay failed: ``loss``, ``grads``,
            ``buffers``, ``raised``; None where it did not, or where there
            is none.
        phase: Of the incident's ``where``.
        given: What was bad before any operation: ``input``,
            ``annotation``, ``weight``, ``buffer`` or None.
        by_step: Whether an update has made a weight bad that was fine.
        label: Whether what is blamed is a label, and no box or mask.
        replays: By name: ``first`` and ``again`` (nothing changed),
            ``lower scale``, ``term lowered``, ``losses in fp32``,
            ``heads in fp32``, ``part in fp32``, ``all in fp32``,
            ``bfloat16``, ``annotation repaired``, ``pixels repaired``,
            ``normalised``. What was not made is missing.
        readings: By name: ``moments``, ``eps``, ``update``, ``growth``,
            ``norm`` (the gradient that a lower scale gives is absurd).
    """

    failed: str | None = None
    phase: str | None = None
    given: str | None = None
    by_step: bool = False
    label: bool = False
    replays: dict[str, Replay] = dataclasses.field(default_factory=dict)
    readings: dict[str, Reading] = dataclasses.field(default_factory=dict)

    def gone(self, name: str) -> bool:
        """Whether that replay was made, and the failure did not come."""
        return name in self.replays and self.replays[name].gone

    def stays(self, name: str) -> bool:
        """Whether that replay was made, and the failure came."""
        return name in self.replays and not self.replays[name].gone

    def bad(self, name: str) -> bool:
        """Whether that reading was made, and is a reason."""
        return name in self.readings and self.readings[name].bad


#: Names of the replays and readings that decide, or None.
Rule = Callable[[Facts], Optional[Sequence[str]]]


def _when(holds: bool, *names: str) -> Sequence[str] | None:
    return names if holds else None


def _differs(facts: Facts) -> Sequence[str] | None:
    """Two replays of the same thing that do not agree."""
    if {'first', 'again'} <= set(facts.replays):
        return _when(facts.gone('first') != facts.gone('again'),
                     'first', 'again')
    return None


def _never_came(facts: Facts) -> Sequence[str] | None:
    """It cannot be had again: nothing that follows says anything."""
    return _when(facts.gone('first'), 'first',
                 *['again'] * ('again' in facts.replays))


def _weight(facts: Facts) -> Sequence[str] | None:
    return _when(facts.given == 'weight' and not facts.by_step, 'first')


def _optimizer(facts: Facts) -> Sequence[str] | None:
    if facts.given != 'weight' or not facts.by_step:
        return None
    names = [name for name in ('moments', 'eps') if facts.bad(name)]
    return _when(bool(names), 'first', *names[:1])


def _by_step(facts: Facts) -> Sequence[str] | None:
    return _when(facts.given == 'weight' and facts.by_step, 'first',
                 'moments', 'update')


def _buffer(facts: Facts) -> Sequence[str] | None:
    return _when(facts.given == 'buffer', 'first')


def _label(facts: Facts) -> Sequence[str] | None:
    return _when(facts.label and facts.gone('annotation repaired'),
                 'annotation repaired')


def _annotation(facts: Facts) -> Sequence[str] | None:
    if facts.gone('annotation repaired'):
        return ['annotation repaired']
    return _when(facts.given == 'annotation', 'first')


def _pixels(facts: Facts) -> Sequence[str] | None:
    for name in ('normalised', 'pixels repaired'):
        if facts.gone(name):
            return [name]
    return _when(facts.given == 'input' or facts.phase == 'input', 'first')


def _term(facts: Facts) -> Sequence[str] | None:
    return _when(facts.gone('term lowered'), 'term lowered')


def _thrown(facts: Facts) -> Sequence[str] | None:
    """The last step had thrown the weights away."""
    return _when(facts.bad('update') and facts.failed is not None, 'first',
                 'update')


def _diverged(facts: Facts) -> Sequence[str] | None:
    """The run had left its way, and no replay has given a usual gradient."""
    usual = 'norm' in facts.readings and not facts.bad('norm')
    return _when(facts.bad('growth') and facts.failed is not None
                 and not usual, 'first', 'growth',
                 *['norm'] * facts.bad('norm'))


def _exploding(facts: Facts) -> Sequence[str] | None:
    return _when(facts.gone('lower scale') and facts.bad('norm'),
                 'lower scale', 'norm')


def _scale(facts: Facts) -> Sequence[str] | None:
    return _when(facts.gone('lower scale'), 'lower scale', 'norm')


def _unsafe_loss(facts: Facts) -> Sequence[str] | None:
    for name in ('losses in fp32', 'heads in fp32'):
        if facts.gone(name):
            return [name]
    for name in ('part in fp32', 'all in fp32'):
        if facts.gone(name):
            return _when(facts.phase == 'loss', name)
    return None


def _half_overflow(facts: Facts) -> Sequence[str] | None:
    for name in ('part in fp32', 'all in fp32'):
        if facts.gone(name):
            return [name]
    return None


def _not_half(facts: Facts) -> Sequence[str] | None:
    """It comes in full precision, with the weights held still."""
    return _when(facts.stays('all in fp32'), 'all in fp32')


_RULES: tuple[tuple[str, Rule], ...] = (
    ('NF112', _differs),
    ('NF113', _never_came),
    ('NF109', _weight),
    ('NF111', _optimizer),
    ('NF108', _by_step),
    ('NF110', _buffer),
    ('NF106', _label),
    ('NF104', _annotation),
    ('NF105', _pixels),
    ('NF108', _term),
    ('NF108', _thrown),
    ('NF108', _diverged),
    ('NF108', _exploding),
    ('NF101', _scale),
    ('NF103', _unsafe_loss),
    ('NF102', _half_overflow),
    ('NF107', _not_half),
)


def verdict(facts: Facts) -> tuple[str, list[str]]:
    """The cause code, and what decided it.

    Args:
        facts: What replays and readings have shown.

    Returns:
        Code, and evidence: each line begins with the name of its replay or
        reading. NF113 where no rule holds.
    """
    for code, rule in _RULES:
        names = rule(facts)
        if names is not None:
            return code, _lines(facts, names)
    return 'NF113', _lines(facts, list(facts.replays))


def _lines(facts: Facts, names: Sequence[str]) -> list[str]:
    """What these have shown; a control that agrees speaks for all."""
    names = [*names, *['again'] * (facts.stays('again')
                                   and 'again' not in names)]
    shown: dict[str, str] = {}
    for name in names:
        known = facts.replays.get(name) or facts.readings.get(name)
        if known is not None:
            shown[name] = known.words
    return [f'{name}: {words}' for name, words in shown.items()]
