"""Makes the replays that a search for an origin asks for."""
from __future__ import annotations

import copy
from typing import Callable, Collection, List

from torch import nn

from .batches import Images, KeptBatch
from .buffers import WatchedBuffers
from .experiments import Ground, inquire
from .finite import can_be_checked, is_finite
from .host import Host
from .provenance import Provenance
from .replay import (
    Forward,
    Outcome,
    Replays,
    Request,
    can_replay,
    is_out_of_memory,
    said,
)
from .search import MOST, Findings
from .sites import Sites
from .transaction import Transaction, cuda_devices, has_room
from .trial import num_classes_of

__all__ = ['Locator']

Agree = Callable[[bool], List[int]]


class _Steps:
    """A search that never raises: what fails in it ends it.

    A batch that cannot be copied, a sample of an unknown kind: that must
    not end the training, nor leave other processes waiting.

    Attributes:
        request: The replay that is asked for, or None at the end.
        found: What was found; complete at the end.
        images: Of the batch.
    """

    def __init__(self, model: nn.Module, kept: KeptBatch,
                 good: KeptBatch | None, raised: str | None,
                 ground: Ground) -> None:
        self.request: Request | None = None
        self.found = Findings()
        self.images = Images({})
        self._model = model
        self._raised, self._ground = raised, ground
        self._advance(lambda: self._begin(kept, good))

    def _begin(self, kept: KeptBatch, good: KeptBatch | None) -> Request:
        # A copy: both may be the same containers with other contents.
        other = Images(copy.deepcopy(good.put_back())) if (
            good is not None and good.can_be_had) else None
        self.images = Images(kept.put_back())
        self._steps = inquire(
            self.images, other, num_classes_of(self._model), self._raised,
            self._ground, self.found)
        return next(self._steps)

    def take(self, outcome: Outcome) -> None:
        """Go on with the outcome of what was asked for."""
        if self.request is not None:
            self._advance(lambda: self._steps.send(outcome))

    def _advance(self, ask: Callable[[], Request]) -> None:
        self.request = None
        try:
            self.request = ask()
        except StopIteration:
            pass
        except Exception as error:
            text = f'the search raised {said(error)}'
            if self.found.origin is None:
                self.found.replay = text
            else:
                self.found.tests.append(text)


class Locator:
    """Makes the replays that a search asks for.

    Args:
        model: The bare model.
        transaction: Of its steps; closed when something is looked for.
        host: Runs forwards.
    """

    def __init__(self, model: nn.Module, transaction: Transaction,
                 host: Host) -> None:
        self._model = model
        self._host = host
        self._replays = Replays(model, transaction, host)

    def find(self, forward: Forward | None, good: KeptBatch | None,
             scale: float, buffers: WatchedBuffers,
             agree: Agree | None = None,
             raised: str | None = None, meant: Collection[str] = (),
             ground: Ground | None = None) -> Findings:
        """Look for where a failure began.

        Args:
            forward: What the failing forward began with, if that is known.
            good: An earlier batch that did not fail.
            scale: Loss scale.
            buffers: Which must stay finite.
            agree: As for :class:`.GuardedStep`: all processes make the same
                number of replays.
            raised: Type of the exception that the step has raised, if any.
            meant: Names of weights that hold infinities on purpose.
            ground: What the run was like; None for full precision.

        Returns:
            The findings. Gradients are gone; the batch, the model and the
            generators are as they were.
        """
        reason = self._reason(forward, alone=agree is None)
        # Asked whatever the answer: the others ask too.
        cannot = agree(reason is not None) if agree else reason
        if cannot or forward is None:
            return Findings(replay=reason or 'another rank cannot')
        kept = forward.batch
        after = KeptBatch(kept.value)
        try:
            steps = _Steps(self._model, kept, good, raised,
                           ground or Ground(alone=agree is None))
            self._drive(steps, forward, scale, buffers, agree, meant)
            return steps.found
        finally:
            after.put_back()

    def _reason(self, forward: Forward | None, alone: bool
                ) -> str | None:
        """Why a replay cannot be made, or None."""
        if forward is None:
            return 'no batch was seen'
        if not can_replay():
            return 'this torch is too old for it'
        if not forward.batch.can_be_had:
            return 'the model has written to the batch'
        if not alone and not has_room(cuda_devices(self._model)):
            # Several processes: one that runs out leaves the others waiting.
            return 'there is not enough memory'
        return None

    def _drive(self, steps: _Steps, forward: Forward, scale: float,
               buffers: WatchedBuffers, agree: Agree | None,
               meant: Collection[str]) -> None:
        for _ in range(MOST):
            wanted = steps.request is not None
            ranks = agree(wanted) if agree else [0] * wanted
            if not ranks:
                return
            asked, mine = self._together(steps.request, ranks[0])
            try:
                outcome = self._make(asked, steps.images, forward, scale,
                                     buffers, agree is not None, meant)
            except Exception as error:
                # No replay is worth a training, least of all the memory.
                outcome = Outcome(error='ran out of memory' if (
                    is_out_of_memory(error)) else f'raised {said(error)}')
            if mine:
                steps.take(outcome)

    def _together(self, request: Request | None, first: int
                  ) -> tuple[Request, bool]:
        """The replay that all processes make, that of the first that asks.

        Returns:
            It, and whether it is what this process asks for. What is not
            comes in another round.
        """
        share = self._host.broadcast
        if share is None:
            return request or Request(), True
        own = request.shared() if request is not None else None
        shared = share(own, first)
        if request is not None and own == shared:
            return request, True
        return Request(**shared), False

    def _make(self, asked: Request, images: Images, forward: Forward,
              scale: float, buffers: WatchedBuffers, backward: bool,
              meant: Collection[str]) -> Outcome:
        kept = forward.batch
        probe = self._probe(images, kept, buffers, asked, meant) if (
            asked.probe or asked.mended) else None
        batch = kept.put_back() if asked.batch is None else asked.batch
        try:
            return self._replays.run(
                forward, batch,
                scale if asked.scale is None else asked.scale,
                buffers.watched(), probe, backward, asked)
        finally:
            kept.put_back()

    def _probe(self, images: Images, kept: KeptBatch,
               buffers: WatchedBuffers, asked: Request,
               on_purpose: Collection[str]) -> Provenance:
        pixels: dict[int, str] = {}
        for image, tensor in images.pixels():
            place = tensor.untyped_storage()._cdata
            pixels[place] = 'the batch' if place in pixels else (
                image.to_image()['img_path'])
        given = []
        for tensor in kept.tensors:
            name = pixels.get(tensor.untyped_storage()._cdata)
            given.append(('annotation', 'an annotation', tensor)
                         if name is None else ('input', name, tensor))
        weights = dict(self._model.named_parameters())
        given += [('weight', name, tensor) for name, tensor
                  in weights.items() if name not in on_purpose]
        given += [('buffer', name, tensor) for name, tensor
                  in buffers.watched().items()]
        meant = [tensor for name, tensor in self._model.named_buffers()
                 if name in buffers.exempt]
        meant += [weights[name] for name in on_purpose if name in weights]
        return Provenance(
            Sites(self._model),
            [item for item in given if can_be_checked(item[2])
             and not is_finite(item[2])],
            [tensor for tensor in meant if can_be_checked(tensor)],
            asked.mended)
