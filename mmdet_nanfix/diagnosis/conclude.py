"""Conclude from findings: where a failure began, why, and what helps."""
from __future__ import annotations

import dataclasses
from typing import Any, Callable

from ..guard import Evidence, Explanation, StepParts
from ..incidents import Cause, Where
from .cause.advice import Case, advise
from .cause.config_patch import LossModules, is_loss, weight_of
from .cause.symptoms import Symptoms
from .cause.verdict import CauseEvidence, select_remedy, verdict
from .context import RunContext
from .exceptions import ExceptionDetails
from .findings import (
    Counterfactual,
    Experiment,
    Failure,
    Findings,
    ReplayStatus,
)
from .parts import ModelParts
from .replay.annotations import AnnotationFault
from .replay.op_record import CallSite, OpRecord

__all__ = ['Conclusion', 'origin_of', 'refine_where', 'where_raised']

_GIVEN = {'input': 'input', 'annotation': 'input', 'weight': 'params',
          'buffer': 'buffers'}
_REACHED = {Failure.LOSS: 'the loss', Failure.GRADS: 'gradients',
            Failure.BUFFERS: 'buffers', Failure.RAISED: 'an exception'}


def details_of(evidence: Evidence) -> ExceptionDetails:
    """Return what is known of the exception of a step."""
    caught = evidence.caught
    return (caught.details if caught is not None else None) or (
        ExceptionDetails())


class Conclusion:
    """Draws conclusions from what was found out about a failed step.

    Args:
        step: Parts of the guarded step.
        parts: Of the model.
    """

    def __init__(self, step: StepParts, parts: ModelParts) -> None:
        self._step = step
        self._parts = parts
        self._symptoms = Symptoms(step)

    def draw(self, told: Explanation, evidence: Evidence, found: Findings,
             context: RunContext) -> None:
        """Complete an explanation.

        Args:
            told: Is completed.
            evidence: Of the step; its heads are known better then.
            found: What replays have shown.
            context: Of the run.
        """
        bad = details_of(evidence).bad
        told.images = found.images or [
            item.to_image() for item in bad] or None
        told.origin = origin_of(found)
        told.where = self._where(evidence, found)
        told.heads = evidence.heads
        if found.status is not ReplayStatus.ELSEWHERE:
            told.cause = self._cause(told.where, evidence, found, context)
            told.remedy = select_remedy(told.cause, found, context.sane) if (
                context.can_retry) else None

    def _where(self, evidence: Evidence, found: Findings) -> Where:
        """Tell where it began; owners of losses are known better then."""
        result = found.result
        if result is not None:
            self._parts.note_sites({
                key: [site.module for site in sites]
                for key, sites in result.owners.items()})
            shown = evidence.shown
            evidence.heads = self._parts.state(
                shown.terms if shown else {}, evidence.bad_grads)
        where, caught = evidence.where, evidence.caught
        if caught is not None and caught.kind:
            details = details_of(evidence)
            where = where_raised(
                details.site, details.op or (result.running if result
                                             else None), self._parts)
        if where.phase == 'params' and found.origin is None:
            bad = [name for name in self._parts.bad_weights()
                   if name not in self._parts.constants]
            step = self._by_step(bad[0]) if bad else None
            return dataclasses.replace(where, phase='step', op=step) if (
                step) else where
        return refine_where(where, found, self._parts, self._by_step)

    def _by_step(self, weight: str) -> str | None:
        """The optimizer, where it has made a weight bad.

        It has, where the weight was fine at first, and nobody else moves it.
        """
        parameter = dict(self._step.model.named_parameters())[weight]
        moved = parameter.requires_grad and (
            id(parameter) in self._step.optimized())
        if not moved or weight in self._parts.bad_at_start:
            return None
        return f'{type(self._step.optimizer).__name__}.step'

    def _cause(self, where: Where, evidence: Evidence, found: Findings,
               context: RunContext) -> Cause:
        """Reach the verdict, and advise what helps."""
        given = found.given[0] if found.given else None
        if found.origin is None:
            # Weights and buffers are bad whether or not it is replayed.
            given = {'params': 'weight', 'step': 'weight'}.get(
                where.phase or '')
        bad = details_of(evidence).bad
        blamed = found.blamed if found.images else bad
        experiments = dict(found.experiments)
        if bad:
            # The trial of the exception was one as well.
            experiments.setdefault(
                Counterfactual.ANNOTATION_REPAIRED, Experiment(True, (
                    'the forward does not raise with what is bad repaired')))
        symptoms = self._symptoms.read(found.norm)
        code, lines = verdict(CauseEvidence(
            found.failed, where.phase, given, where.phase == 'step',
            bool(blamed) and blamed[0].fault is AnnotationFault.LABEL,
            experiments, symptoms))
        advice, patch = advise(code, Case(
            found, where, context, symptoms, self._losses(where, found)))
        return Cause(code, lines, advice, patch)

    def _losses(self, where: Where, found: Findings) -> LossModules:
        model = self._step.model
        began = where.module if where.module and is_loss(
            model, where.module) else None
        sites = found.result.owners.get(found.term[0], []) if (
            found.result is not None and found.term is not None) else []
        dominant = next((site.module for site in sites if site.module
                         and is_loss(model, site.module)), None)
        return LossModules(
            began, type(model.get_submodule(began)).__name__ if began
            else None, dominant, weight_of(model, dominant))


def where_raised(site: CallSite, op: str | None,
                 parts: ModelParts) -> Where:
    """Where an exception was raised.

    Args:
        site: The place.
        op: The function of a library that raised, or None.
        parts: Of the model.
    """
    return Where(phase='loss' if site.in_loss else 'forward',
                 module=site.module or None,
                 op=op or site.function,
                 source=site.source, head=_owner(site, parts))


def _owner(site: CallSite, parts: ModelParts) -> str | None:
    return parts.owner_of_name(f'{site.module}.') if site.module else None


def refine_where(where: Where, found: Findings, parts: ModelParts,
                 by_step: Callable[[str], str | None]) -> Where:
    """Where it began, with what a replay has found.

    Args:
        where: Of the first look.
        found: Of the search.
        parts: Of the model.
        by_step: Called with the name of a bad weight: name of the
            optimizer, where it has made it so.
    """
    origin = found.origin
    if origin is None:
        return where
    if origin.given is not None:
        return _where_given(origin, parts, by_step)
    site = origin.site
    module = site.module or None
    phase = 'loss' if site.in_loss else 'forward'
    if module is not None and module.startswith('data_preprocessor'):
        phase = 'input'
    elif found.failed is Failure.GRADS:
        phase = 'backward'
    head = _owner(site, parts)
    if found.failed is Failure.BUFFERS and where.phase == 'buffers':
        phase, head, module = 'buffers', where.head, where.module
    if phase == 'input':
        head = None
    return Where(phase=phase, head=head, module=module, level=site.level,
                 op=origin.op, source=site.source, kind=_kind(origin))


def _where_given(origin: OpRecord, parts: ModelParts,
                 by_step: Callable[[str], str | None]) -> Where:
    kind, name = origin.given or ('', '')
    phase = _GIVEN[kind]
    if phase == 'input':
        return Where(phase=phase, kind=_kind(origin))
    step = by_step(name) if kind == 'weight' else None
    return Where(phase='step' if step else phase, op=step,
                 head=parts.owner_of_name(name), kind=_kind(origin),
                 module=name if kind == 'buffer' else (
                     name.rpartition('.')[0]))


def _kind(origin: OpRecord) -> str | None:
    counts = origin.outputs[0] if origin.outputs else {}
    return next((kind for kind in ('nan', 'inf', '-inf')
                 if counts.get(kind)), None)


def origin_of(found: Findings) -> dict[str, Any] | None:
    """All that is known of an origin, for the log."""
    origin = found.origin
    if origin is None:
        return None
    return {
        'op': origin.op,
        'source': origin.site.source,
        'function': origin.site.function,
        'module': origin.site.module,
        'given': list(origin.given) if origin.given else None,
        'in_backward': origin.backward,
        'reached': _REACHED[found.failed] if found.failed else None,
        'inputs': origin.inputs,
        'outputs': origin.outputs,
        'others': [f'{other.op} at {other.site.source}'
                   for other in found.others],
        'tests': _tests(found),
    }


def _tests(found: Findings) -> list[str]:
    """All replays and what they showed, each once."""
    return [*found.tests, *(
        f'{name.value}: {experiment.words}'
        for name, experiment in found.experiments.items()
        if name is not Counterfactual.FIRST)]
