"""Conduct a diagnosis: look, replay, conclude.

What fails on the way costs the explanation, not the run: there is one
boundary for errors. Processes of a run meet between its parts, never within.
"""
from __future__ import annotations

from typing import Any, Callable, ContextManager, Mapping

from torch import Tensor, nn

from ..guard import (
    CapturedForward,
    CaughtException,
    Evidence,
    Explanation,
    MicroStep,
    StepParts,
)
from ..guard.checks import bad_tensors
from ..guard.rules import ErrorBoundary
from ..guard.state import Rng, cuda_devices, has_room
from ..incidents import Cause
from .cause.config_patch import config_place
from .context import RunContext
from .exceptions import explain
from .findings import Findings, ReplayStatus
from .first_look import find_where, worst_of
from .parts import ModelParts
from .replay.call_site import CallSites
from .replay.probe import NonFiniteTracer
from .replay.request import is_out_of_memory

__all__ = ['Diagnostician']

# Of a window, that are replayed to find the one with bad gradients.
_MOST_FORWARDS = 8


class Diagnostician:
    """The :class:`.Diagnosis` that replays failed steps.

    Args:
        step: Parts of the guarded step.
        parts: Of the model.
        investigate: Finds out about one forward, of
            :class:`.Investigator`.
        conclusion: Draws conclusions, a :class:`.Conclusion`.
        max_incidents: After so many failed steps nothing is replayed; None
            for always, 0 for never.

    Attributes:
        good: What the last accepted step began with.
    """

    def __init__(self, step: StepParts, parts: ModelParts,
                 investigate: Callable[..., Findings], conclusion: Any,
                 max_incidents: int | None = 100) -> None:
        self._step = step
        self._ranks = step.trainer.ranks
        self._parts = parts
        self._investigate = investigate
        self._conclusion = conclusion
        self._left = -1 if max_incidents is None else max_incidents
        self.good: CapturedForward | None = None

    def stop_replaying(self) -> None:
        """Replay nothing from now on."""
        self._left = 0

    def note_terms(self, terms: Mapping[str, list[Tensor]]) -> None:
        """Remember who owns which loss, before a graph is let go."""
        self._parts.note_owners(terms)

    def accept(self, forward: CapturedForward | None) -> None:
        """Remember what an accepted step began with."""
        self.good = forward

    def catch(self, error: Exception, module: nn.Module,
              forward: Callable[..., Any], args: tuple[Any, ...],
              kwargs: Mapping[str, Any], rng: Rng
              ) -> CaughtException | None:
        """Tell by replays if an exception comes from what is not finite."""
        if is_out_of_memory(error):
            return None
        # A batch that cannot be copied, a sample of an unknown kind: the
        # user's own exception is what counts.
        with ErrorBoundary():
            return explain(error, module, forward, args, kwargs, rng,
                           self._step.transaction.reset, self._mending)
        return None

    def _mending(self) -> ContextManager[None]:
        """Region in which what is not finite is set to 0."""
        trainer = self._step.trainer
        return NonFiniteTracer(
            CallSites(self._step.model), trainer.half_op, mended=None
        ).following(trainer.untraced)

    def look(self, window: list[MicroStep]) -> Evidence:
        """Look at losses, gradients, buffers and weights; some reads."""
        evidence, loss_bad = Evidence(window), False
        with ErrorBoundary():
            evidence.shown, loss_bad = worst_of(window)
            evidence.bad_buffers = self._step.buffers.bad()
        evidence.ranks = self._ranks.which(
            loss_bad or bool(evidence.bad_buffers))
        evidence.flagged = bool(evidence.ranks)
        with ErrorBoundary():
            self._parts.refresh()
            evidence.bad_grads = self._bad_grads(evidence.flagged)
            evidence.heads = self._parts.state(
                evidence.shown.terms if evidence.shown else {},
                evidence.bad_grads)
            evidence.where = find_where(
                self._parts, evidence.heads, loss_bad, evidence.bad_buffers,
                evidence.flagged)
        return evidence

    def _bad_grads(self, flagged: bool) -> list[str]:
        """Names of parameters whose own gradient is bad; two reads."""
        named, anchor = self._parts.parameters, self._step.anchor
        bad = bad_tensors([parameter.grad for _, parameter in named])
        own = not flagged or not anchor.own_gradient_finite()
        return [named[i][0] for i in bad
                if own or named[i][1] is not anchor.parameter]

    def explain(self, evidence: Evidence, can_retry: bool) -> Explanation:
        """Replay the failing forward, as long as that is allowed.

        Args:
            evidence: Of the step; what it changed is undone.
            can_retry: Whether the step can be made again.
        """
        context = RunContext(alone=self._ranks.alone)
        together = self._all_have_room()
        with ErrorBoundary():
            context = self._context(together, can_retry)
        found = self._replayed(evidence, context)
        told = Explanation(
            evidence.where, evidence.heads, fits=found.fits,
            failed_here=found.failed is not None
            and found.status is not ReplayStatus.ELSEWHERE,
            replay=found.replay)
        with ErrorBoundary() as boundary:
            self._conclusion.draw(told, evidence, found, context)
        if boundary.error and found.status is not ReplayStatus.ELSEWHERE:
            told.cause = Cause('NF113', [], (
                f'The verdict raised {boundary.error}.'))
        return told

    def _context(self, together: bool, can_retry: bool) -> RunContext:
        config, model = self._step.trainer.config.model, self._step.model
        return RunContext.of(self._step, together, can_retry,
                             lambda name: config_place(model, name, config))

    def _replayed(self, evidence: Evidence, context: RunContext) -> Findings:
        """Replay forwards of the window until one fails.

        Where gradients alone are bad, any forward of the window may have
        made them so: the last first.
        """
        if self._step.sharded:
            return Findings(replay='parameters are shards')
        if self._left == 0:
            return Findings(replay='there were too many before')
        self._left -= self._left > 0
        shown = evidence.shown
        # As all ranks see it: they replay as many.
        alike = [shown] if evidence.flagged or shown is None else (
            evidence.window[::-1])
        first = None
        for micro in alike[:_MOST_FORWARDS]:
            found = self._investigate(
                micro.forward if micro else None, context,
                self.good.batch if self.good else None,
                micro.caught.kind if micro and micro.caught else None)
            first = first or found
            failed = found.failed is not None
            ranks = self._ranks.which(failed)
            if ranks:
                if not failed or (evidence.ranks and self._ranks.rank
                                  not in evidence.ranks):
                    found.status = ReplayStatus.ELSEWHERE
                    found.replay = 'it began on another rank'
                if not self._ranks.alone and not evidence.ranks:
                    evidence.ranks = ranks
                return found
        return first or Findings(replay='no batch was seen')

    def _all_have_room(self) -> bool:
        """Whether all of several processes can compute in fp32."""
        return not self._ranks.alone and not self._ranks.which(
            not has_room(cuda_devices(self._step.model), 2.))
