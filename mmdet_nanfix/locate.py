"""Where a failure began, by replaying it: operation, image, annotation.

A search asks for one replay after the other and reads each outcome; it runs
none itself, so that several processes can keep step. Nothing is blamed that
a replay has not shown: an operation, because non-finite numbers went from it
to the loss; an image or an annotation, because the failure does not come
with a good one in its place.
"""
import copy
import dataclasses
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Generator,
    List,
    Optional,
    Sequence,
)

from torch import nn

from .batches import Image, Images, KeptBatch
from .buffers import WatchedBuffers
from .finite import can_be_checked, is_finite
from .provenance import Provenance, Record
from .replay import Forward, Host, Outcome, Replays, can_replay
from .sites import Sites
from .transaction import Transaction, cuda_devices, has_room
from .trial import num_classes_of

__all__ = ['Findings', 'Locator', 'Request', 'search']

# Replays with another batch, and replays in all; each costs about a step.
_MOST = 6
_ROUNDS = _MOST + 3


@dataclasses.dataclass
class Request:
    """A replay that is asked for.

    Attributes:
        batch: In the place of the one that failed, or None for that.
        probe: Whether origins are looked for.
        mended: Indices of operations whose results are made finite.
    """

    batch: Optional[Any] = None
    probe: bool = False
    mended: FrozenSet[int] = frozenset()


@dataclasses.dataclass
class Findings:
    """What a search has found.

    Attributes:
        failed: Of the first replay, see :class:`.Outcome`.
        origin: Where it began, or None where that was not found.
        others: Further origins that reached the same place.
        images: Entries of an incident's ``images``; None where no image
            is known to be to blame.
        tests: Replays and what they showed, in words.
        replay: Why there is no origin, in words, or None.
        outcome: Of the first replay.
    """

    failed: Optional[str] = None
    origin: Optional[Record] = None
    others: List[Record] = dataclasses.field(default_factory=list)
    images: Optional[List[Dict[str, Any]]] = None
    tests: List[str] = dataclasses.field(default_factory=list)
    replay: Optional[str] = None
    outcome: Optional[Outcome] = None


Search = Generator[Request, Outcome, Findings]


def search(images: Images, last_good: Optional[Images],
           num_classes: Optional[int]) -> Search:
    """Look for the origin, then for the image and the annotation.

    Args:
        images: Of the failing batch.
        last_good: Of an earlier batch that did not fail, to take a good
            image from where the batch has no other.
        num_classes: Labels are below it.

    Yields:
        Replays to make, about one to six.

    Returns:
        The findings.
    """
    found = Findings()
    outcome = yield Request(probe=True)
    found.outcome, found.failed = outcome, outcome.failed
    if outcome.error is not None:
        found.replay = f'the replay {outcome.error}'
        return found
    if outcome.failed is None:
        found.replay = 'the failure did not come again in a replay'
        return found
    yield from _choose(outcome, found)
    kind = found.origin.given[0] if (
        found.origin is not None and found.origin.given) else None
    if kind in ('weight', 'buffer'):
        return found
    bad_pixels = [image for image, tensor in images.pixels()
                  if tensor.is_floating_point() and not is_finite(tensor)]
    if bad_pixels and kind == 'input':
        found.images = [image.to_image() for image in bad_pixels]
        return found
    yield from _Blame(images, last_good, num_classes, found).go()
    return found


def _choose(outcome: Outcome, found: Findings
            ) -> Generator[Request, Outcome, None]:
    """Of several places, take one without which nothing fails."""
    places: Dict[Any, List[Record]] = {}
    for record in outcome.origins:
        # A layer that is shared by levels is one place.
        places.setdefault((record.op, record.site.source), []).append(record)
    firsts = [records[0] for records in places.values()]
    if not firsts:
        return
    found.origin, found.others = firsts[0], firsts[1:6]
    if len(firsts) == 1 or any(record.given for record in firsts):
        return
    for records in list(places.values())[:2]:
        outcome = yield Request(mended=frozenset(
            record.index for record in records))
        if outcome.error is None and outcome.failed is None:
            found.origin = records[0]
            found.tests.append(f'with the result of {found.origin.op} made '
                               'finite nothing fails')
            found.others = [other for other in firsts[:6]
                            if other is not found.origin]
            return


class _Blame:
    """Looks for the image and the annotation to blame."""

    def __init__(self, images: Images, last_good: Optional[Images],
                 num_classes: Optional[int], found: Findings) -> None:
        self._images = images
        self._last_good = last_good
        self._bad = images.bad_annotations(num_classes)
        self._found = found
        self._left = _MOST

    def go(self) -> Generator[Request, Outcome, None]:
        """Annotations first, then whole images."""
        if self._bad and (yield from self._holds(
                self._images.repaired(self._bad))):
            yield from self._which_annotation()
            return
        image = yield from self._which_image()
        if image is not None:
            self._found.images = [image.to_image()]

    def _holds(self, batch: Optional[Any]
               ) -> Generator[Request, Outcome, bool]:
        """Whether nothing fails with another batch."""
        if batch is None or self._left == 0:
            return False
        self._left -= 1
        outcome = yield Request(batch=batch)
        if outcome.error is not None:
            self._found.tests.append(f'a test {outcome.error}')
            self._left = 0
        return outcome.error is None and outcome.failed is None

    def _which_annotation(self) -> Generator[Request, Outcome, None]:
        """Which of the annotations that look bad is enough by itself."""
        blamed = self._bad
        if len(blamed) > 1:
            for item in blamed[:3]:
                if (yield from self._holds(self._images.repaired([item]))):
                    blamed = [item]
                    break
        self._found.images = [bad.to_image() for _, bad in blamed]
        self._found.tests.append(
            f'with {_named(blamed)} repaired nothing fails')

    def _which_image(self) -> Generator[Request, Outcome, Optional[Image]]:
        """The one image without which nothing fails, or None."""
        suspects = self._suspects()
        for image in suspects[:1] if len(suspects) > 2 else suspects:
            if (yield from self._without([image])):
                return image
        if len(suspects) <= 2:
            return None
        del suspects[0]
        while suspects:
            half = suspects[:(len(suspects) + 1) // 2]
            if (yield from self._without(half)):
                if len(half) == 1:
                    return half[0]
                suspects = half
            else:
                suspects = suspects[len(half):]
        return None

    def _without(self, images: Sequence[Image]
                 ) -> Generator[Request, Outcome, bool]:
        holds = yield from self._holds(
            self._images.without(images, self._last_good))
        if holds and len(images) == 1:
            self._found.tests.append(
                'with another image in its place nothing fails')
        return holds

    def _suspects(self) -> List[Image]:
        """All images, the one that the origin points to first."""
        images = self._images.images
        hint = self._hint()
        if hint is not None and hint in images:
            images.remove(hint)
            images.insert(0, hint)
        return images

    def _hint(self) -> Optional[Image]:
        """The image whose row of the origin's result is bad."""
        origin = self._found.origin
        if origin is None:
            return None
        if origin.site.image is not None:
            return self._images.at(origin.site.image)
        rows, count = origin.rows
        if rows and count == self._images.size and len(rows) < count:
            return self._images.at(rows[0])
        return None


def _named(blamed: Sequence[Any]) -> str:
    return 'the annotation' if len(blamed) == 1 else (
        f'{len(blamed)} annotations')


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
                 good: Optional[KeptBatch]) -> None:
        self.request: Optional[Request] = None
        self.found = Findings()
        self.images = Images({})
        self._model = model
        self._advance(lambda: self._begin(kept, good))

    def _begin(self, kept: KeptBatch, good: Optional[KeptBatch]) -> Request:
        # A copy: both may be the same containers with other contents.
        other = Images(copy.deepcopy(good.put_back())) if good else None
        self.images = Images(kept.put_back())
        self._steps = search(self.images, other, num_classes_of(self._model))
        return next(self._steps)

    def take(self, outcome: Outcome) -> None:
        """Go on with the outcome of what was asked for."""
        if self.request is not None:
            self._advance(lambda: self._steps.send(outcome))

    def _advance(self, ask: Callable[[], Request]) -> None:
        self.request = None
        try:
            self.request = ask()
        except StopIteration as done:
            self.found = done.value
        except Exception as error:
            text = ' '.join(str(error).split())[:200]
            self.found = Findings(
                replay=f'the search raised {type(error).__name__}: {text}')


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
        self._replays = Replays(model, transaction, host)

    def find(self, forward: Forward, good: Optional[KeptBatch], scale: float,
             buffers: WatchedBuffers, agree: Optional[Agree] = None
             ) -> Findings:
        """Look for where a failure began.

        Args:
            forward: What the failing forward began with.
            good: An earlier batch that did not fail.
            scale: Loss scale.
            buffers: Which must stay finite.
            agree: As for :class:`.GuardedStep`: all processes make the same
                number of replays.

        Returns:
            The findings. Gradients are gone; the batch, the model and the
            generators are as they were.
        """
        kept = forward.batch
        reason = self._reason(kept, alone=agree is None)
        if agree(reason is not None) if agree else reason:
            return Findings(replay=reason or 'another rank cannot')
        after = KeptBatch(kept.value)
        try:
            return self._drive(forward, good, scale, buffers, agree)
        finally:
            after.put_back()

    def _reason(self, kept: KeptBatch, alone: bool) -> Optional[str]:
        """Why a replay cannot be made, or None."""
        if not can_replay():
            return 'this torch is too old for it'
        if not kept.can_be_had:
            return 'the model has written to the batch'
        if not alone and not has_room(cuda_devices(self._model)):
            # Several processes: one that runs out leaves the others waiting.
            return 'there is not enough memory'
        return None

    def _drive(self, forward: Forward, good: Optional[KeptBatch],
               scale: float, buffers: WatchedBuffers,
               agree: Optional[Agree]) -> Findings:
        kept = forward.batch
        steps = _Steps(self._model, kept, good)
        for _ in range(_ROUNDS):
            wanted = steps.request is not None
            if not (agree(wanted) if agree else wanted):
                break
            asked = steps.request or Request()
            probe = self._probe(steps.images, kept, buffers, asked) if (
                asked.probe or asked.mended) else None
            outcome = self._replays.run(
                forward, kept.put_back() if asked.batch is None else (
                    asked.batch), scale, buffers.watched(), probe,
                backward=agree is not None)
            kept.put_back()
            steps.take(outcome)
        return steps.found

    def _probe(self, images: Images, kept: KeptBatch,
               buffers: WatchedBuffers, asked: Request) -> Provenance:
        pixels: Dict[int, str] = {}
        for image, tensor in images.pixels():
            place = tensor.untyped_storage()._cdata
            pixels[place] = 'the batch' if place in pixels else (
                image.to_image()['img_path'])
        given = []
        for tensor in kept.tensors:
            name = pixels.get(tensor.untyped_storage()._cdata)
            given.append(('annotation', 'an annotation', tensor)
                         if name is None else ('input', name, tensor))
        given += [('weight', name, tensor) for name, tensor
                  in self._model.named_parameters()]
        given += [('buffer', name, tensor) for name, tensor
                  in buffers.watched().items()]
        meant = [tensor for name, tensor in self._model.named_buffers()
                 if name in buffers.exempt]
        return Provenance(
            Sites(self._model),
            [item for item in given if can_be_checked(item[2])
             and not is_finite(item[2])],
            [tensor for tensor in meant if can_be_checked(tensor)],
            asked.mended)
