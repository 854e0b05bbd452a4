"""What is found out about a failed step: evidence, origin, cause.

The evidence is gathered while losses and gradients of the step are still
there; replays come after what the step has changed was taken back.
"""
from __future__ import annotations

import dataclasses
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Sequence,
)

import torch
from torch import Tensor, nn

from .advice import Known, advise
from .buffers import WatchedBuffers
from .causes import Facts, Reading, Replay, verdict
from .config_places import config_place, is_loss, weight_of
from .evidence import first_look, origin_of, refined, where_raised
from .experiments import Ground
from .finite import Anchor, bad_tensors
from .heads import Parts
from .history import History
from .host import Host
from .incidents import Cause, HeadState, Incident, LossScaleChange, Where
from .locate import Locator
from .origins import Record
from .policy import LossScale
from .replay import Forward, said
from .search import Findings
from .transaction import Transaction, cuda_devices, has_room
from .trial import Raised

__all__ = ['ELSEWHERE', 'Evidence', 'Inquiry', 'MicroStep']

#: Why there is no origin, where it is not of this process.
ELSEWHERE = 'it began on another rank'

Losses = Dict[str, List[Tensor]]
Agree = Callable[[bool], List[int]]
# Of a window, that are replayed to find the one with bad gradients.
_MOST_FORWARDS = 8


@dataclasses.dataclass
class MicroStep:
    """One backward of the accumulation window.

    ``raised`` is the exception that came instead of losses, ``forward``
    what it began with.
    """

    loss: Tensor
    terms: Losses
    raised: Raised | None = None
    forward: Forward | None = None

    def detached(self) -> MicroStep:
        """Without the graph, so that a window holds one graph at a time."""
        return dataclasses.replace(
            self, loss=self.loss.detach(), terms={
                key: [term.detach() for term in terms]
                for key, terms in self.terms.items()})


@dataclasses.dataclass
class Evidence:
    """What a failed step shows before anything is replayed or taken back.

    Attributes:
        window: Its micro-steps.
        micro: The one to show, or None.
        loss_bad: Whether its loss is not finite.
        bad_buffers: Names of buffers that are not.
        ranks: Processes where it began: where a loss or a buffer is bad,
            else where gradients are.
        flagged: Whether a loss or a buffer is bad in any process.
        bad_grads: Names of parameters with a bad gradient.
        where: Of the first look.
        heads: State of every part.
    """

    window: list[MicroStep]
    micro: MicroStep | None
    loss_bad: bool
    bad_buffers: list[str]
    ranks: list[int]
    flagged: bool
    bad_grads: list[str]
    where: Where
    heads: dict[str, HeadState]

    @property
    def raised(self) -> Raised | None:
        """The exception that the step raised, if any."""
        return self.micro.raised if self.micro else None


class Inquiry:
    """Finds out about failed steps of one model and optimizer.

    Args:
        model: The bare model.
        optimizer: Its optimizer.
        transaction: Of its steps; closed when something is looked for.
        buffers: Which must stay finite.
        anchor: Carries the state of the losses.
        scale: The loss scale.
        host: Runs replays.
        rank: Process of a distributed run.
        agree: As for :class:`.GuardedStep`.
        optimized: Returns ``id`` of each parameter that is optimized.
        max_incidents: After so many failed steps nothing is replayed; None
            for always, 0 for never.

    Attributes:
        history: Of the accepted steps.
        good: What the last accepted step began with, or None.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer,
                 transaction: Transaction, buffers: WatchedBuffers,
                 anchor: Anchor, scale: LossScale, host: Host, rank: int,
                 agree: Agree | None, optimized: Callable[[], set[int]],
                 max_incidents: int | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._buffers = buffers
        self._anchor = anchor
        self._scale = scale
        self._host = host
        self._rank = rank
        self._agree = agree
        self._optimized = optimized
        self._left = -1 if max_incidents is None else max_incidents
        self._parts = Parts(model)
        self._locator = Locator(model, transaction, host)
        self._bad_from_the_start = set(self._parts.bad_weights())
        self._meant = self._parts.infinite_constants()
        self.history = History(optimizer)
        self.good: Forward | None = None

    def note_owners(self, terms: Losses) -> None:
        """Remember who owns which loss, before a graph is let go."""
        self._parts.note_owners(terms)

    def gather(self, window: list[MicroStep]) -> Evidence:
        """Look at losses, gradients, buffers and weights; some reads.

        Args:
            window: The micro-steps; gradients must still be there.
        """
        micro, loss_bad = _worst(window)
        bad_buffers = self._buffers.bad()
        here = loss_bad or bool(bad_buffers)
        ranks = ([self._rank] if here else []) if self._agree is None else (
            self._agree(here))
        # Layers may have been unfrozen or added since the last look.
        self._parts = parts = Parts(self._model, self._parts)
        bad_grads = self._bad_grads(bool(ranks))
        heads = parts.state(micro.terms if micro else {}, bad_grads)
        where = first_look(parts, heads, loss_bad, bad_buffers, bool(ranks),
                           self._meant)
        return Evidence(window, micro, loss_bad, bad_buffers, ranks,
                        bool(ranks), bad_grads, where, heads)

    def _bad_grads(self, flagged: bool) -> list[str]:
        """Names of parameters whose own gradient is bad; two reads."""
        named = self._parts.parameters
        bad = bad_tensors([parameter.grad for _, parameter in named])
        own = not flagged or not self._anchor.own_gradient_finite()
        return [named[i][0] for i in bad
                if own or named[i][1] is not self._anchor.parameter]

    def find(self, evidence: Evidence, scale: float,
             sharded: bool = False, can_step: bool = False) -> Findings:
        """Replay the failing forward, as long as that is allowed.

        Where gradients alone are bad, any forward of the window may have
        made them so: the last first.

        Args:
            evidence: Of the step; what it changed is taken back.
            scale: Its loss scale.
            sharded: Parameters are shards.
            can_step: Whether the step can be tried again.
        """
        if sharded:
            return Findings(replay='parameters are shards')
        if self._left == 0:
            return Findings(replay='there were too many before')
        self._left -= self._left > 0
        micro = evidence.micro
        # As all ranks see it: they replay as many.
        alike = [micro] if evidence.flagged or micro is None else (
            evidence.window[::-1])
        first = None
        for item in alike[:_MOST_FORWARDS]:
            found = self._find(item, scale, can_step)
            first = first or found
            failed = found.failed is not None
            ranks = self._agree(failed) if self._agree else [0] * failed
            if ranks:
                if not failed or (evidence.ranks
                                  and self._rank not in evidence.ranks):
                    found.replay = ELSEWHERE
                if self._agree and not evidence.ranks:
                    evidence.ranks = ranks
                return found
        return first or Findings(replay='no batch was seen')

    def _find(self, item: MicroStep | None, scale: float,
              can_step: bool) -> Findings:
        rules, host = self._scale.settings, self._host
        ground = Ground(
            half=host.half, fp32=host.fp32, scale=scale,
            lowest=min(rules.min_scale, scale) if rules.enabled else scale,
            backoff=rules.backoff_factor, part=self._part_of,
            sane=self.history.sane, usual=self.history.usual_loss,
            alone=self._agree is None,
            together=self._all_have_room(),
            normaliser=getattr(self._model, 'data_preprocessor', None),
            can_step=can_step)
        return self._locator.find(
            item.forward if item is not None else None,
            self.good.batch if self.good else None, scale, self._buffers,
            self._agree, raised=item.raised.error.partition(':')[0]
            if item is not None and item.raised else None, meant=self._meant,
            ground=ground)

    def _all_have_room(self) -> bool:
        """Whether all of several processes can compute in fp32."""
        if self._agree is None or self._host.broadcast is None:
            return False
        return not self._agree(not has_room(cuda_devices(self._model), 2.))

    def _part_of(self, record: Record) -> str | None:
        module = record.site.module
        return self._parts.owner_of_name(f'{module}.') if module else None

    def look_again(self) -> Findings:
        """Replay the last forward of a step that was accepted.

        With the weights of now: for finding out whether anything is blamed
        where nothing is wrong.
        """
        if self.good is None:
            return Findings(replay='no step was accepted yet')
        return self._locator.find(self.good, None, self._scale.scale,
                                  self._buffers, self._agree,
                                  meant=self._meant)

    def where(self, evidence: Evidence, found: Findings) -> Where:
        """Where it began; owners of losses are known better from here on."""
        if found.outcome is not None:
            self._parts.note_sites({
                key: [site.module for site in sites]
                for key, sites in found.outcome.owners.items()})
            micro = evidence.micro
            evidence.heads = self._parts.state(
                micro.terms if micro else {}, evidence.bad_grads)
        where, raised = evidence.where, evidence.raised
        if raised is not None and raised.error:
            where = where_raised(raised, self._parts, found.outcome.running
                                 if found.outcome is not None else None)
        if where.phase == 'params' and found.origin is None:
            return self._of_weights(where)
        return refined(where, found, self._parts, self._by_step)

    def _of_weights(self, where: Where) -> Where:
        """Whether an update has made weights bad, without a replay."""
        bad = [name for name in self._parts.bad_weights()
               if name not in self._meant]
        step = self._by_step(bad[0]) if bad else None
        return dataclasses.replace(where, phase='step', op=step) if (
            step) else where

    def _by_step(self, weight: str) -> str | None:
        """The optimizer, where it has made a weight bad.

        It has, where the weight was fine at first, and nobody else moves it.
        """
        parameter = dict(self._model.named_parameters())[weight]
        moved = parameter.requires_grad and (
            id(parameter) in self._optimized())
        if not moved or weight in self._bad_from_the_start:
            return None
        return f'{type(self._optimizer).__name__}.step'

    def cause(self, where: Where, evidence: Evidence, found: Findings
              ) -> Cause | None:
        """The verdict, and what helps.

        Args:
            where: Of :meth:`where`.
            evidence: Of the step.
            found: Of :meth:`find`.

        Returns:
            None where it began in another process.
        """
        if found.replay == ELSEWHERE:
            return None
        try:
            facts = self._facts(where, evidence, found)
            code, lines = verdict(facts)
            advice, patch = advise(code, self._known(where, facts, found))
        except Exception as error:
            # An optimizer or a loss of an unknown kind is worth no training.
            code, lines, patch = 'NF113', [], None
            advice = f'The verdict raised {said(error)}.'
        return Cause(code, lines, advice, patch)

    def _facts(self, where: Where, evidence: Evidence,
               found: Findings) -> Facts:
        given = found.origin.given[0] if (
            found.origin is not None and found.origin.given) else None
        if given is None and found.origin is None:
            # Weights and buffers are bad whether or not it is replayed.
            given = {'params': 'weight', 'step': 'weight'}.get(
                where.phase or '')
        readings = self.history.readings(self._model)
        if found.norm is not None:
            readings['norm'] = self._norm_reading(found.norm)
        blamed = [image['annotation'] for image in found.images or (
            [bad.to_image() for bad in evidence.raised.bad]
            if evidence.raised else []) if image['annotation']]
        replays = dict(found.replays)
        if evidence.raised is not None and evidence.raised.bad:
            # The trial of the exception was one as well.
            replays.setdefault('annotation repaired', Replay(True, (
                'the forward does not raise with what is bad repaired')))
        return Facts(
            failed=found.failed, phase=where.phase, given=given,
            by_step=where.phase == 'step', replays=replays,
            label=bool(blamed) and blamed[0]['what'].startswith('label'),
            readings=readings)

    def _norm_reading(self, norm: float) -> Reading:
        largest = self.history.largest
        if largest is None:
            return Reading(False, 'no step was accepted before, to compare '
                           f'a gradient norm of {norm:.3g} with')
        return Reading(self.history.sane(norm) is False, (
            f'a gradient norm of {norm:.3g}, where the largest of the last '
            f'accepted steps is {largest:.3g}'))

    def _known(self, where: Where, facts: Facts, found: Findings) -> Known:
        model, half = self._model, self._host.half
        config = self._host.config
        key = found.term[0] if found.term else ''
        term = self._loss_module(found, key)
        loss = where.module if where.module and is_loss(
            model, where.module) else None
        return Known(
            found=found, where=where, half=half,
            scale=self._scale.scale, start=self._scale.settings.start()[0],
            norm=self.history.usual, rate=self.history.learning_rate,
            safe_rate=self.history.safe_rate(),
            update_is_bad=facts.bad('update'), growth=facts.bad('growth'),
            eps=self._least_eps(), absurd=facts.bad('norm'),
            moments=facts.readings['moments'], term=term,
            term_weight=weight_of(model, term),
            loss=loss, loss_type=type(
                model.get_submodule(loss)).__name__ if loss else None,
            place=lambda name: config_place(model, name, config.model),
            clips_anew=config.clips_anew, by_hook=config.by_hook)

    def _least_eps(self) -> float | None:
        known = [group['eps'] for group in self._optimizer.param_groups
                 if isinstance(group.get('eps'), (int, float))]
        return float(min(known)) if known else None

    def _loss_module(self, found: Findings, key: str) -> str | None:
        """Path of the module that computes a loss term, or None."""
        outcome = found.outcome
        sites = outcome.owners.get(key, []) if outcome is not None else []
        return next((site.module for site in sites if site.module
                     and is_loss(self._model, site.module)), None)

    def incident(self, where: Where, evidence: Evidence, found: Findings,
                 **settled: Any) -> Incident:
        """The record.

        Args:
            where: Of :meth:`where`.
            evidence: Of the step.
            found: Of :meth:`find`.
            **settled: ``epoch``, ``iter``, ``action``, ``counts``,
                ``cause``, ``remedy`` and ``loss_scale`` of an incident; the
                last as before and after.
        """
        raised = evidence.raised
        before, after = settled.pop('loss_scale')
        return Incident(
            rank=self._rank, where=where, heads=evidence.heads,
            loss_scale=LossScaleChange(before, after),
            images=found.images or (
                [bad.to_image() for bad in raised.bad] or None
                if raised else None),
            error=raised.error or None if raised else None,
            ranks=evidence.ranks or None if self._agree is not None else (
                None),
            origin=origin_of(found), replay=found.replay, **settled)


def _worst(window: Sequence[MicroStep]
           ) -> tuple[MicroStep | None, bool]:
    """The micro-step to show, and whether its loss is bad; one read.

    One that raised, else the first with a bad loss, else the last.
    """
    if not window:
        return None, False
    for micro in window:
        if micro.raised is not None:
            return micro, True
    bad = bad_tensors([micro.loss for micro in window])
    return (window[bad[0]], True) if bad else (window[-1], False)
