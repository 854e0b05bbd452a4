"""Decide why a step failed, by what counterfactual replays have shown.

A verdict is the first rule that holds, and its evidence is what that rule has
looked at: with another outcome of one of these replays it is another verdict.
"""
from __future__ import annotations

import dataclasses
from typing import Callable, Mapping, Optional, Sequence

from ...guard import Remedy
from ...incidents import Cause
from ..findings import Counterfactual, Experiment, Failure, Findings
from .symptoms import Symptom

__all__ = ['CauseEvidence', 'select_remedy', 'verdict']


@dataclasses.dataclass
class CauseEvidence:
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
        experiments: What was tried; what was not is missing.
        symptoms: By name: ``moments``, ``eps``, ``update``, ``growth``,
            ``norm`` (the gradient that a lower scale gives is absurd).
    """

    failed: Failure | None = None
    phase: str | None = None
    given: str | None = None
    by_step: bool = False
    label: bool = False
    experiments: Mapping[Counterfactual, Experiment] = dataclasses.field(
        default_factory=dict)
    symptoms: Mapping[str, Symptom] = dataclasses.field(default_factory=dict)

    def cured(self, name: Counterfactual) -> bool:
        """Tell if that was tried, and the failure did not come."""
        return name in self.experiments and self.experiments[name].cured

    def stays(self, name: Counterfactual) -> bool:
        """Tell if that was tried, and the failure came."""
        return name in self.experiments and not self.experiments[name].cured

    def bad(self, name: str) -> bool:
        """Tell if that symptom was read, and is a reason."""
        return name in self.symptoms and self.symptoms[name].bad


(FIRST, AGAIN, LOWER_SCALE, TERM_LOWERED, LOSSES_FP32, HEADS_FP32, PART_FP32,
 ALL_FP32, BFLOAT16, LOSSES_MENDED, ANNOTATION_REPAIRED, PIXELS_REPAIRED,
 NORMALISED) = Counterfactual
#: Names of the experiments and symptoms that decide, or None.
Rule = Callable[[CauseEvidence], Optional[Sequence[str]]]


def _when(holds: bool, *names: str) -> Sequence[str] | None:
    return names if holds else None


def _differs(evidence: CauseEvidence) -> Sequence[str] | None:
    """Two replays of the same thing that do not agree."""
    if {FIRST, AGAIN} <= set(evidence.experiments):
        return _when(evidence.cured(FIRST) != evidence.cured(AGAIN),
                     FIRST, AGAIN)
    return None


def _never_came(evidence: CauseEvidence) -> Sequence[str] | None:
    """It cannot be had again: nothing that follows says anything."""
    return _when(evidence.cured(FIRST), FIRST,
                 *[AGAIN] * (AGAIN in evidence.experiments))


def _weight(evidence: CauseEvidence) -> Sequence[str] | None:
    return _when(evidence.given == 'weight' and not evidence.by_step, FIRST)


def _optimizer(evidence: CauseEvidence) -> Sequence[str] | None:
    if evidence.given != 'weight' or not evidence.by_step:
        return None
    names = [name for name in ('moments', 'eps') if evidence.bad(name)]
    return _when(bool(names), FIRST, *names[:1])


def _by_step(evidence: CauseEvidence) -> Sequence[str] | None:
    return _when(evidence.given == 'weight' and evidence.by_step, FIRST,
                 'moments', 'update')


def _buffer(evidence: CauseEvidence) -> Sequence[str] | None:
    return _when(evidence.given == 'buffer', FIRST)


def _label(evidence: CauseEvidence) -> Sequence[str] | None:
    return _when(evidence.label and evidence.cured(ANNOTATION_REPAIRED),
                 ANNOTATION_REPAIRED)


def _annotation(evidence: CauseEvidence) -> Sequence[str] | None:
    if evidence.cured(ANNOTATION_REPAIRED):
        return [ANNOTATION_REPAIRED]
    return _when(evidence.given == 'annotation', FIRST)


def _pixels(evidence: CauseEvidence) -> Sequence[str] | None:
    for name in (NORMALISED, PIXELS_REPAIRED):
        if evidence.cured(name):
            return [name]
    return _when(evidence.given == 'input' or evidence.phase == 'input', FIRST)


def _term(evidence: CauseEvidence) -> Sequence[str] | None:
    return _when(evidence.cured(TERM_LOWERED), TERM_LOWERED)


def _thrown(evidence: CauseEvidence) -> Sequence[str] | None:
    """The last step had thrown the weights away."""
    return _when(evidence.bad('update') and evidence.failed is not None, FIRST,
                 'update')


def _diverged(evidence: CauseEvidence) -> Sequence[str] | None:
    """The run had left its way, and no replay has given a usual gradient."""
    usual = 'norm' in evidence.symptoms and not evidence.bad('norm')
    return _when(evidence.bad('growth') and evidence.failed is not None
                 and not usual, FIRST, 'growth',
                 *['norm'] * evidence.bad('norm'))


def _exploding(evidence: CauseEvidence) -> Sequence[str] | None:
    return _when(evidence.cured(LOWER_SCALE) and evidence.bad('norm'),
                 LOWER_SCALE, 'norm')


def _scale(evidence: CauseEvidence) -> Sequence[str] | None:
    return _when(evidence.cured(LOWER_SCALE), LOWER_SCALE, 'norm')


def _unsafe_loss(evidence: CauseEvidence) -> Sequence[str] | None:
    for name in (LOSSES_FP32, HEADS_FP32):
        if evidence.cured(name):
            return [name]
    for name in (PART_FP32, ALL_FP32):
        if evidence.cured(name):
            return _when(evidence.phase == 'loss', name)
    return None


def _half_overflow(evidence: CauseEvidence) -> Sequence[str] | None:
    for name in (PART_FP32, ALL_FP32):
        if evidence.cured(name):
            return [name]
    return None


def _not_half(evidence: CauseEvidence) -> Sequence[str] | None:
    """It comes in full precision, with the weights held still."""
    return _when(evidence.stays(ALL_FP32), ALL_FP32)


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


def verdict(evidence: CauseEvidence) -> tuple[str, list[str]]:
    """Return the cause code, and what decided it.

    Args:
        evidence: What replays and symptoms have shown.

    Returns:
        Code, and evidence: each line begins with the name of its experiment
        or symptom. NF113 where no rule holds.
    """
    for code, rule in _RULES:
        names = rule(evidence)
        if names is not None:
            return code, _lines(evidence, names)
    return 'NF113', _lines(evidence, list(evidence.experiments))


def _lines(evidence: CauseEvidence, names: Sequence[str]) -> list[str]:
    """What these have shown; a control that agrees speaks for all."""
    names = [*names, *[AGAIN] * (evidence.stays(AGAIN)
                                 and AGAIN not in names)]
    shown: dict[str, str] = {}
    for name in names:
        if isinstance(name, Counterfactual):
            tried = evidence.experiments.get(name)
            if tried is not None:
                shown[name.value] = tried.words
        elif name in evidence.symptoms:
            shown[name] = evidence.symptoms[name].words
    return [f'{name}: {words}' for name, words in shown.items()]


def select_remedy(cause: Cause | None, found: Findings,
                  sane: Callable[[float], bool | None]) -> Remedy | None:
    """Select the remedy that the evidence is for, or None.

    Args:
        cause: The verdict.
        found: What the experiments have shown.
        sane: Tells if an unscaled gradient norm is one to step on.
    """
    if cause is None or found.norm is None or sane(found.norm) is not True:
        return None
    if cause.code == 'NF101' and found.fits is not None:
        return Remedy('retried', found.fits)
    if cause.code in ('NF102', 'NF103'):
        modes = [(Counterfactual.of_mode(found.mode), found.mode)] if (
            found.mode) else []
        for name, fp32 in ((Counterfactual.PART_FP32, found.part), *modes):
            if fp32 is not None and name in found.proven:
                return Remedy('rescued_fp32_head', found.fits, (fp32, ))
    return None
