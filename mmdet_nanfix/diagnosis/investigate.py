"""Investigate one forward by replays: where it began, what would help."""
from __future__ import annotations

import copy

from ..guard import CapturedForward, StepParts
from ..guard.checks import can_be_checked, is_finite
from ..guard.rules import ErrorBoundary
from ..guard.state import BatchSnapshot
from .context import RunContext
from .counterfactuals import Counterfactuals
from .exceptions import num_classes_of
from .findings import Asking, Failure, Findings, ReplayResult
from .parts import ModelParts
from .replay.batch_view import BatchView
from .replay.call_site import CallSites
from .replay.culprit import CulpritSearch
from .replay.driver import ReplayDriver
from .replay.op_record import OpRecord
from .replay.origin import find_origins, select_origin
from .replay.probe import NonFiniteTracer
from .replay.replayer import Replayer
from .replay.request import ReplayRequest

__all__ = ['Investigator']


class Investigator:
    """Finds out about failed forwards by replays.

    Args:
        step: Parts of the guarded step.
        parts: Of the model.
    """

    def __init__(self, step: StepParts, parts: ModelParts) -> None:
        self._step = step
        self._model = step.model
        self._parts = parts
        self._driver = ReplayDriver(step)
        self._replayer = Replayer(step)

    def investigate(self, forward: CapturedForward | None,
                    context: RunContext, good: BatchSnapshot | None = None,
                    raised: str | None = None) -> Findings:
        """Find where a failure began, by replays.

        Args:
            forward: What the failing forward began with, if that is known.
            context: Of the run.
            good: An earlier batch that did not fail.
            raised: Type of the exception that the step has raised, if any.

        Returns:
            The findings. Gradients are gone; the batch, the model and the
            generators are as they were.
        """
        found = Findings(replay=self._driver.why_not(forward))
        if found.replay is not None or forward is None:
            return found
        kept, after = forward.batch, BatchSnapshot(forward.batch.value)

        def run(asked: ReplayRequest) -> ReplayResult:
            probe = self._probe(kept, asked) if (
                asked.probe or asked.mended) else None
            batch = kept.restore() if asked.batch is None else asked.batch
            try:
                return self._replayer.run(
                    forward, batch, context.scale if asked.scale is None
                    else asked.scale, probe, not context.alone, asked)
            finally:
                kept.restore()

        def search() -> Asking[None]:
            with ErrorBoundary() as boundary:
                # A copy: both may be the same containers with other contents.
                other = BatchView(copy.deepcopy(good.restore())) if (
                    good is not None and good.is_restorable) else None
                yield from self.search(BatchView(kept.restore()), other,
                                        context, found, raised)
            text = f'the search raised {boundary.error}'
            if boundary.error and found.origin is None:
                found.replay = text
            elif boundary.error:
                found.tests.append(text)

        try:
            self._driver.drive(search(), run)
        finally:
            after.restore()
        return found

    def search(self, view: BatchView, other: BatchView | None,
               context: RunContext, found: Findings, raised: str | None
               ) -> Asking[None]:
        """Find the origin and the image, and try what would have helped.

        Several processes make the same replays, and none with another
        batch, which may raise in one of them and leave the others waiting.

        Args:
            view: The failing batch.
            other: An earlier batch that did not fail, if there is one.
            context: Of the run.
            found: Is filled in on the way.
            raised: Type of the exception that the step has raised, if any.

        Yields:
            Replays to make, one to ten.
        """
        trying = Counterfactuals(view, context, found, self._part_of)
        if not (yield from find_origins(found, raised)):
            found.note_first()
            if context.alone and found.failed is None:
                yield from trying.again()
            return
        if found.failed is Failure.GRADS:
            yield from trying.scales()
        culprit = CulpritSearch(view, other, num_classes_of(self._model),
                                found, context.alone)
        # What a lower scale cures began wherever it was highest; and what a
        # part in fp32 cures needs no other proof that it began there.
        trials = context.alone and not trying.settled
        half_first = not trying.settled and trying.may_be_half(
            culprit.suspects)
        later = trials and half_first and len(
            found.result.origins if found.result else ()) == 1
        yield from select_origin(found, trials and not later)
        found.note_first()
        if not trying.settled:
            if half_first:
                yield from trying.precisions()
            if not trying.helped:
                if later:
                    found.origin = None
                    yield from select_origin(found, True)
                yield from culprit.go()
                if context.alone:
                    yield from trying.pixels()
                if context.can_widen and not half_first:
                    yield from trying.precisions()
        if context.can_widen and not trying.saves and trying.cured:
            # What was seen to help has helped, if it still comes without.
            yield from trying.again()

    def _part_of(self, record: OpRecord) -> str | None:
        module = record.site.module
        return self._parts.owner_of_name(f'{module}.') if module else None

    def _probe(self, kept: BatchSnapshot, asked: ReplayRequest
               ) -> NonFiniteTracer:
        """A probe that knows what is not finite before any operation."""
        buffers = self._step.buffers
        weights = dict(self._model.named_parameters())
        given = [
            *BatchView(kept.value).given(kept.tensors),
            *(('weight', name, tensor) for name, tensor in weights.items()
              if name not in self._parts.constants),
            *(('buffer', name, tensor) for name, tensor
              in buffers.watched().items())]
        meant = [*(tensor for name, tensor in self._model.named_buffers()
                   if name in buffers.exempt),
                 *(weights[name] for name in self._parts.constants
                   if name in weights)]
        return NonFiniteTracer(
            CallSites(self._model), self._step.trainer.half_op,
            [item for item in given if can_be_checked(item[2])
             and not is_finite(item[2])],
            [tensor for tensor in meant if can_be_checked(tensor)],
            asked.mended)
