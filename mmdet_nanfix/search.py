"""Where a failure began, by replaying it: operation, image, annotation.

A search asks for one replay after the other and reads each outcome; it runs
none itself, so that several processes can keep step. Nothing is blamed that
a replay has not shown: an operation, because non-finite numbers went from it
to the loss; an image or an annotation, because the failure does not come
with a good one in its place.
"""
from __future__ import annotations

import dataclasses
from typing import (
    Any,
    Generator,
    Sequence,
)

from .batches import Image, Images
from .causes import Replay
from .finite import is_finite
from .origins import Record
from .replay import Outcome, Place, Request

__all__ = ['Blame', 'Findings', 'MOST', 'choose', 'is_gone', 'look', 'search']

# Replays with another batch; each costs about a step.
_MOST = 6
_LEAST = 4
#: Replays that a search asks for at most.
MOST = _MOST + 10

# What is looked at one after the other: nothing of the later is known.
_ORDER = ('raised', 'loss', 'grads', 'buffers', None)


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
        trials: Replays that were made to choose among origins.
        replays: What counterfactual replays have shown, by name.
        proven: Names of those after which the whole step was finite.
        fits: The highest loss scale at which it is, or None.
        norm: Unscaled gradient norm of the step that would be saved.
        part: The part of the model that helps in fp32, or None.
        mode: The regions that help in fp32, or None.
        term: Key of a loss term, and a factor that helps.
        normalised: Mean and standard deviation that help.
    """

    failed: str | None = None
    origin: Record | None = None
    others: list[Record] = dataclasses.field(default_factory=list)
    images: list[dict[str, Any]] | None = None
    tests: list[str] = dataclasses.field(default_factory=list)
    replay: str | None = None
    outcome: Outcome | None = None
    trials: int = 0
    replays: dict[str, Replay] = dataclasses.field(default_factory=dict)
    proven: set[str] = dataclasses.field(default_factory=set)
    fits: float | None = None
    norm: float | None = None
    part: str | None = None
    mode: str | None = None
    term: tuple[str, float] | None = None
    normalised: tuple[list[float], list[float]] | None = None


# What steps a search makes: replays are asked for, outcomes come back.
Search = Generator[Request, Outcome, Findings]


def search(images: Images, last_good: Images | None,
           num_classes: int | None, raised: str | None = None,
           alone: bool = True, found: Findings | None = None) -> Search:
    """Look for the origin, then for the image and the annotation.

    Args:
        images: Of the failing batch.
        last_good: Of an earlier batch that did not fail, to take a good
            image from where the batch has no other.
        num_classes: Labels are below it.
        raised: Type of the exception that the step has raised, if any.
        alone: Whether this is the only process. Else one replay is asked
            for: another batch than the one that failed may raise where that
            did not, and leave the other processes waiting.
        found: Is filled in on the way.

    Yields:
        Replays to make, about one to six.

    Returns:
        The findings.
    """
    found = found if found is not None else Findings()
    if (yield from look(found, raised)):
        yield from choose(found, alone)
        yield from Blame(images, last_good, num_classes, found, alone).go()
    return found


def look(found: Findings, raised: str | None
         ) -> Generator[Request, Outcome, bool]:
    """Look for origins.

    Args:
        found: Is filled in.
        raised: As for :func:`search`.

    Returns:
        Whether the failure came again.
    """
    outcome = yield Request(probe=True)
    found.outcome, found.failed = outcome, outcome.failed
    found.replay = _no_failure(outcome, raised)
    return found.replay is None


def _no_failure(outcome: Outcome, raised: str | None) -> str | None:
    """Why the first replay is none of the failure, in words, or None."""
    if outcome.error is not None:
        return f'the replay {outcome.error}'
    if outcome.failed is None:
        return 'the failure did not come again in a replay'
    if outcome.failed == 'raised' and outcome.raised != raised:
        return f'the replay raised {outcome.raised}'
    return None


def choose(found: Findings, trials: bool
           ) -> Generator[Request, Outcome, None]:
    """Of several places, take one without which it does not fail.

    For an exception even of one: that something bad was at hand where it was
    raised is no proof. What was given that way cannot be tried, and comes
    after what can.

    Args:
        found: Is filled in.
        trials: Whether to try; else the first is taken.
    """
    outcome = found.outcome
    if outcome is None:
        return
    places: dict[Any, Record] = {}
    for record in outcome.origins:
        # A layer that is shared by levels is one place.
        places.setdefault((*_place(record), record.given), record)
    firsts = list(places.values())
    tried = [record for record in firsts if record.seen and not record.given]
    raised = outcome.failed == 'raised'
    if trials and tried and (raised or len(firsts) > 1):
        proven = yield from _tried(tried, outcome, found)
        if proven is not None:
            firsts.remove(proven)
            firsts.insert(0, proven)
        elif raised:
            firsts = [first for first in firsts if first.given]
    if firsts:
        found.origin, found.others = firsts[0], firsts[1:6]
    elif not raised:
        found.replay = 'no operation made it of what was finite'


def _tried(records: list[Record], first: Outcome, found: Findings
           ) -> Generator[Request, Outcome, Record | None]:
    """The origin without which the failure is gone, or none.

    All together at first: what does not help then does not help alone.
    """

    def helps(group: Sequence[Record]
              ) -> Generator[Request, Outcome, tuple[bool, Outcome]]:
        found.trials += 1
        outcome = yield Request(mended=frozenset(
            map(_place, group)), until=first.failed)
        gone = is_gone(outcome, first)
        if gone:
            names = dict.fromkeys(record.op for record in group[:3])
            found.tests.append(f'with the result of {" and ".join(names)} '
                               'set to 0 it does not come')
        return gone, outcome

    gone, outcome = yield from helps(records)
    if not gone:
        # What was bad before may now be an origin.
        known = set(map(_place, records))
        more = [record for record in outcome.origins if record.seen
                and not record.given and _place(record) not in known]
        if more:
            gone, _ = yield from helps([*records, *more])
        return records[0] if gone else None
    for record in records[:2] if len(records) > 1 else []:
        gone, _ = yield from helps([record])
        if gone:
            return record
    return records[0]


def _place(record: Record) -> Place:
    return record.op, record.site.source


def is_gone(outcome: Outcome, first: Outcome) -> bool:
    """Whether a replay came further than the first.

    Args:
        outcome: Of the replay.
        first: Of the first, which failed.
    """
    return outcome.error is None and _ORDER.index(
        outcome.failed) > _ORDER.index(first.failed)


class Blame:
    """Looks for the image and the annotation to blame.

    Args:
        images: As for :func:`search`, like the others.
        last_good: Likewise.
        num_classes: Likewise.
        found: Is filled in.
        alone: Likewise.
    """

    def __init__(self, images: Images, last_good: Images | None,
                 num_classes: int | None, found: Findings,
                 alone: bool = True) -> None:
        self._alone = alone
        self._images = images
        self._last_good = last_good
        self._bad = images.bad_annotations(num_classes)
        self._found = found
        self._left = max(_LEAST, _MOST - found.trials)

    @property
    def suspects(self) -> bool:
        """Whether annotations look bad."""
        return bool(self._bad)

    def go(self) -> Generator[Request, Outcome, None]:
        """Annotations first, then whole images."""
        origin, found = self._found.origin, self._found
        kind = origin.given[0] if origin is not None and origin.given else (
            None)
        if kind in ('weight', 'buffer'):
            return
        bad_pixels = [image for image, tensor in self._images.pixels()
                      if tensor.is_floating_point() and not is_finite(tensor)]
        if bad_pixels and kind == 'input':
            found.images = [image.to_image() for image in bad_pixels]
        elif self._alone:
            yield from self._try_others()
        elif kind == 'annotation':
            self.not_finite()

    def _try_others(self) -> Generator[Request, Outcome, None]:
        """Replays with other annotations, then with other images."""
        if self._bad:
            held = yield from self._holds(self._images.repaired(self._bad))
            words = (f'with {_named(self._bad)} repaired it '
                     f'{"does not come" if held else "comes as well"}')
            self._found.replays['annotation repaired'] = Replay(held, words)
            if held:
                yield from self._which_annotation()
                return
        image = yield from self._which_image()
        if image is not None and (yield from self._stays(image)):
            self._found.tests.append(
                'with another image in its place it does not come')
            self._found.images = [image.to_image()]

    def not_finite(self) -> None:
        """Blame annotations that are not finite, without a replay."""
        self._found.images = [bad.to_image() for _, bad in self._bad
                              if bad.rank == 0] or None

    def _stays(self, image: Image) -> Generator[Request, Outcome, bool]:
        """Whether it fails with another of the other images.

        Else the failure hangs on the numbers that were drawn, not on the
        image.
        """
        other = next((item for item in self._images.images
                      if item != image), None)
        batch = None if other is None else self._images.without([other])
        return batch is None or self._left == 0 or not (
            yield from self._holds(batch))

    def _holds(self, batch: Any | None
               ) -> Generator[Request, Outcome, bool]:
        """Whether the failure does not come with another batch."""
        first = self._found.outcome
        if batch is None or self._left == 0 or first is None:
            return False
        self._left -= 1
        outcome = yield Request(batch=batch, until=first.failed)
        if outcome.error is not None:
            self._found.tests.append(f'a test {outcome.error}')
            self._left = 0
        return is_gone(outcome, first)

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
            f'with {_named(blamed)} repaired it does not come')
        self._found.replays['annotation repaired'].words = (
            self._found.tests[-1])

    def _which_image(self) -> Generator[Request, Outcome, Image | None]:
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
        return (yield from self._holds(
            self._images.without(images, self._last_good)))

    def _suspects(self) -> list[Image]:
        """All images, the one that the origin points to first."""
        images = self._images.images
        hint = self._hint()
        if hint is not None and hint in images:
            images.remove(hint)
            images.insert(0, hint)
        return images

    def _hint(self) -> Image | None:
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
