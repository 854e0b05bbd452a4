"""Look for the image and the annotation to blame.

Nothing is blamed that a replay has not shown: the failure does not come with
a good one in its place.
"""
from __future__ import annotations

from typing import Any, Sequence

from ...guard.checks import is_finite
from ..findings import Asking, Counterfactual, Experiment, Findings
from .annotations import AnnotationFault
from .batch_view import BatchView, Image
from .request import ReplayRequest

__all__ = ['CulpritSearch']

# Replays with another batch; each costs about a step.
_MOST, _LEAST = 6, 4


class CulpritSearch:
    """Looks for the image and the annotation to blame.

    Args:
        view: The failing batch.
        last_good: An earlier batch that did not fail, to take a good image
            from where the batch has no other.
        num_classes: Labels are below it.
        found: Is filled in.
        alone: Whether this is the only process. Else nothing is replayed:
            another batch than the one that failed may raise where that did
            not, and leave the other processes waiting.
    """

    def __init__(self, view: BatchView, last_good: BatchView | None,
                 num_classes: int | None, found: Findings,
                 alone: bool = True) -> None:
        self._alone = alone
        self._view = view
        self._last_good = last_good
        self._bad = view.bad_annotations(num_classes)
        self._found = found
        self._left = max(_LEAST, _MOST - found.trials)

    @property
    def suspects(self) -> bool:
        """Whether annotations look bad."""
        return bool(self._bad)

    def go(self) -> Asking[None]:
        """Annotations first, then whole images."""
        found = self._found
        kind = found.given[0] if found.given else None
        if kind in ('weight', 'buffer'):
            return
        bad_pixels = [image for image, tensor in self._view.pixels()
                      if tensor.is_floating_point() and not is_finite(tensor)]
        if bad_pixels and kind == 'input':
            found.images = [image.to_image() for image in bad_pixels]
        elif self._alone:
            yield from self._try_others()
        elif kind == 'annotation':
            self.not_finite()

    def _try_others(self) -> Asking[None]:
        """Replays with other annotations, then with other images."""
        if self._bad:
            held = yield from self._holds(self._view.repaired(self._bad))
            words = (f'with {_named(self._bad)} repaired it '
                     f'{"does not come" if held else "comes as well"}')
            self._found.experiments[
                Counterfactual.ANNOTATION_REPAIRED] = Experiment(held, words)
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
        self._found.blame([bad for _, bad in self._bad if (
            bad.fault is AnnotationFault.NOT_FINITE)])

    def _stays(self, image: Image) -> Asking[bool]:
        """Whether it fails with another of the other images.

        Else the failure hangs on the numbers that were drawn, not on the
        image.
        """
        other = next((item for item in self._view.images
                      if item != image), None)
        batch = None if other is None else self._view.replacing([other])
        return batch is None or self._left == 0 or not (
            yield from self._holds(batch))

    def _holds(self, batch: Any | None) -> Asking[bool]:
        """Whether the failure does not come with another batch."""
        first = self._found.result
        if batch is None or self._left == 0 or first is None:
            return False
        self._left -= 1
        result = yield ReplayRequest(batch=batch, until=first.failed)
        if result.error is not None:
            self._found.tests.append(f'a test {result.error}')
            self._left = 0
        return result.is_past(first)

    def _which_annotation(self) -> Asking[None]:
        """Which of the annotations that look bad is enough by itself."""
        blamed = self._bad
        if len(blamed) > 1:
            for item in blamed[:3]:
                if (yield from self._holds(self._view.repaired([item]))):
                    blamed = [item]
                    break
        self._found.blame([bad for _, bad in blamed])
        self._found.experiments[Counterfactual.ANNOTATION_REPAIRED].words = (
            f'with {_named(blamed)} repaired it does not come')

    def _which_image(self) -> Asking[Image | None]:
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

    def _without(self, images: Sequence[Image]) -> Asking[bool]:
        return (yield from self._holds(
            self._view.replacing(images, self._last_good)))

    def _suspects(self) -> list[Image]:
        """All images, the one that the origin points to first."""
        images = self._view.images
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
            return self._view.at(origin.site.image)
        rows, count = origin.rows
        if rows and count == self._view.size and len(rows) < count:
            return self._view.at(rows[0])
        return None


def _named(blamed: Sequence[Any]) -> str:
    return 'the annotation' if len(blamed) == 1 else (
        f'{len(blamed)} annotations')
