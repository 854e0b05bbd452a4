"""Counterfactual replays: what would have helped the step that failed.

Each changes one thing; weights, buffers, batch and random numbers are those
of the failed step. They are asked for like those of a search, which they
stand around: what a lower loss scale cures needs no image to blame.
"""
from __future__ import annotations

import dataclasses
from typing import Any, Callable, Generator

from .batches import Images
from .causes import DOMINANT, GROWTH, Replay
from .finite import is_finite
from .origins import Record
from .replay import Outcome, Request
from .search import Blame, Findings, Search, choose, is_gone, look

__all__ = ['Ground', 'inquire']

Asked = Generator[Request, Outcome, None]

# ImageNet's, for pixels from 0 to 255, red first.
_MEAN, _STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
# A pixel above is no 8-bit number; normalised, one above this is no pixel.
_BRIGHTEST, _ODD = 255., 1000.


@dataclasses.dataclass
class Ground:
    """What a run was like when a step failed.

    Attributes:
        half: Whether it is in half precision.
        fp32: Which regions it computes in fp32.
        scale: The loss scale of the step.
        lowest: The lowest that the loss scale may be.
        backoff: Factor from one scale to the next lower.
        part: Gives the part of the model where an operation was.
        sane: Whether an unscaled gradient norm is one to step on; None
            where there was none before to compare it with.
        usual: A loss in the steps before, by key, or None.
        normaliser: The model's data preprocessor, or None.
        alone: Whether this is the only process.
        together: Else, whether all can make the same replay at more
            precision.
        can_step: Whether a step can be tried again at once.
    """

    half: bool = False
    fp32: str | None = None
    scale: float = 1.
    lowest: float = 1.
    backoff: float = 0.5
    part: Callable[[Record], str | None] = lambda record: None
    sane: Callable[[float], bool | None] = lambda norm: None
    usual: Callable[[str], float | None] = lambda key: None
    normaliser: Any | None = None
    alone: bool = True
    together: bool = False
    can_step: bool = False

    @property
    def can_widen(self) -> bool:
        """Whether the same batch can be replayed at more precision."""
        return self.alone or self.together


def inquire(images: Images, last_good: Images | None,
            num_classes: int | None, raised: str | None,
            ground: Ground, found: Findings) -> Search:
    """Look for the origin and the image, and try what would have helped.

    Args:
        images: Of the failing batch.
        last_good: Of an earlier batch that did not fail.
        num_classes: Labels are below it.
        raised: Type of the exception that the step has raised, if any.
        ground: Of the run.
        found: Is filled in on the way.

    Yields:
        Replays to make, one to ten. Several processes make the same ones,
        and none with another batch, which may raise in one of them and
        leave the others waiting.

    Returns:
        The findings, ``replays`` among them.
    """
    trying = _Trying(images, ground, found)
    if not (yield from look(found, raised)):
        trying.note_first()
        if ground.alone and found.failed is None:
            yield from trying.again()
        return found
    if found.failed == 'grads':
        yield from trying.scales()
    blame = Blame(images, last_good, num_classes, found, ground.alone)
    # What a lower scale cures began wherever it was highest; and what a part
    # in fp32 cures needs no other proof that it began there.
    trials = ground.alone and not trying.settled
    half_first = not trying.settled and trying.may_be_half(blame)
    later = trials and half_first and len(
        found.outcome.origins if found.outcome else ()) == 1
    yield from choose(found, trials and not later)
    trying.note_first()
    if not trying.settled:
        yield from trying.all_else(blame, half_first, later)
    if ground.can_widen and not trying.saves and any(
            replay.gone for replay in found.replays.values()):
        # What was seen to help has helped, if it still comes without.
        yield from trying.again()
    return found


class _Trying:
    """The experiments on one failed step."""

    def __init__(self, images: Images, ground: Ground,
                 found: Findings) -> None:
        self._images = images
        self._ground = ground
        self._found = found

    def note_first(self) -> None:
        """What the replay with the probe has shown."""
        outcome = self._found.outcome
        if outcome is None or outcome.error is not None:
            return
        words = 'with nothing changed it comes'
        if outcome.failed is None:
            words = 'with nothing changed it does not come'
        elif outcome.raised is not None:
            words += f', as {outcome.raised}'
        given = self._given
        if given is not None:
            words += f'; it goes back to the {given[0]} {given[1]}'
        elif self._found.origin is not None:
            words += f'; it begins at {self._found.origin.op}'
        self._found.replays['first'] = Replay(outcome.failed is None, words)

    @property
    def _given(self) -> tuple[str, str] | None:
        origin = self._found.origin
        return origin.given if origin is not None else None

    @property
    def settled(self) -> bool:
        """Whether a lower scale is enough, with a gradient like any."""
        found = self._found
        return found.fits is not None and found.norm is not None and (
            self._ground.sane(found.norm) is not False)

    @property
    def saves(self) -> bool:
        """Whether the step is made again at once, which is a control."""
        found, ground = self._found, self._ground
        return ground.can_step and found.norm is not None and (
            ground.sane(found.norm) is True)

    @property
    def helped(self) -> bool:
        """Whether more precision in a part of the model has helped."""
        return any(self._found.replays[name].gone for name in (
            'losses in fp32', 'heads in fp32', 'part in fp32')
            if name in self._found.replays)

    @property
    def input_is_odd(self) -> bool:
        """Whether pixels, or what they are normalised with, look bad."""
        return self._is_normalised_oddly() or any(
            tensor.is_floating_point() and _is_odd(tensor)
            for _, tensor in self._images.pixels())

    @property
    def is_open(self) -> bool:
        """Whether what is to blame is not known yet."""
        return self._given is None and not any(
            replay.gone for name, replay in self._found.replays.items()
            if name != 'first')

    def _try(self, name: str, words: str, request: Request
             ) -> Generator[Request, Outcome, Outcome | None]:
        """Ask for one, and note whether the failure came.

        Returns:
            The outcome where it did not come; None where it did, or where
            the replay could not be made.
        """
        first = self._found.outcome
        outcome = yield request
        if outcome.error is not None or first is None:
            self._found.tests.append(f'{name}: not made, the replay '
                                     f'{outcome.error}')
            return None
        gone = is_gone(outcome, first)
        after = '' if gone and outcome.failed is None else (
            f', but then {_FAILED[outcome.failed]}' if gone else '')
        self._found.replays[name] = Replay(
            gone, f'{words} it {"does not come" if gone else "comes as well"}'
            f'{after}')
        return outcome if gone else None

    def may_be_half(self, blame: Blame) -> bool:
        """Whether nothing in the batch looks bad: then fp32 comes first.

        What that helps is no image's fault.
        """
        ground = self._ground
        return ground.can_widen and ground.half and not (
            blame.suspects or self.input_is_odd)

    def all_else(self, blame: Blame, half_first: bool,
                 unproven: bool) -> Asked:
        """Image and annotation, pixels, precision.

        Args:
            blame: Looks for image and annotation.
            half_first: Of :meth:`may_be_half`.
            unproven: Whether the origin was not tried yet.
        """
        ground = self._ground
        if half_first:
            yield from self.precisions()
        if self.helped:
            return
        if unproven:
            self._found.origin = None
            yield from choose(self._found, True)
        yield from blame.go()
        if ground.alone:
            yield from self.pixels()
        if ground.can_widen and not half_first:
            yield from self.precisions()

    def again(self) -> Asked:
        """The control: nothing is changed."""
        first = self._found.outcome
        outcome = yield Request(until=self._found.failed)
        if outcome.error is None and first is not None:
            gone = outcome.failed is None or is_gone(outcome, first)
            self._found.replays['again'] = Replay(gone, (
                'once more with nothing changed it '
                f'{"does not come" if gone else "comes"}'))

    def scales(self) -> Asked:
        """One term of the loss lowered; all of it lowered."""
        found, ground = self._found, self._ground
        if ground.can_widen and (yield from self._lowered_term()):
            return
        if not ground.half or ground.scale <= ground.lowest:
            return
        low = ground.lowest
        outcome = yield from self._try(
            'lower scale', f'at loss scale {low:g}',
            Request(scale=low, gauge=True))
        if outcome is None or outcome.norm is None:
            return
        found.norm = outcome.norm
        found.fits = _fitting(ground, low, outcome.filled or 0.)
        words = f'at loss scale {found.fits:g} it does not come'
        sane = ground.sane(outcome.norm)
        if not (sane and ground.can_step) and ground.alone:
            # Else the step itself shows it.
            outcome = yield Request(scale=found.fits)
            if outcome.failed is not None or outcome.error is not None:
                words = (f'at loss scale {low:g} it does not come, at '
                         f'{found.fits:g} it does')
                found.fits = low
        found.replays['lower scale'] = Replay(True, (
            f'{words}; the gradient norm is {found.norm:.3g}, unscaled'))

    def _lowered_term(self
                      ) -> Generator[Request, Outcome, bool]:
        """The one term that is much larger than the others."""
        outcome = self._found.outcome
        values = {key: abs(value) for key, value in (
            outcome.losses if outcome else {}).items()}
        if len(values) < 2:
            return False
        key = max(values, key=lambda name: values[name])
        others = sum(values.values()) - values[key]
        if values[key] < DOMINANT * max(others, 1.):
            return False
        usual = self._ground.usual(key)
        if others == 0 or usual is not None and values[key] < GROWTH * usual:
            # With this one the run has gone on well so far.
            return False
        factor = 10. ** -len(str(int(values[key] / others)))
        helped = yield from self._try(
            'term lowered', f'with {key} ({values[key]:.3g}, all others '
            f'{others:.3g}) times {factor:g}', Request(factors={key: factor}))
        if helped is None:
            return False
        self._found.term = key, factor
        if helped.failed is None:
            self._found.proven.add('term lowered')
        return True

    def pixels(self) -> Asked:
        """Pixels within 0 to 255; another mean and standard deviation."""
        found = self._found
        if self._given is not None or 'annotation repaired' in (
                found.replays) and found.replays['annotation repaired'].gone:
            return
        blamed = [item['img_path'] for item in found.images or ()]
        odd = [image for image, tensor in self._images.pixels()
               if image.to_image()['img_path'] in blamed and (
                   tensor.is_floating_point() and _is_odd(tensor))]
        if odd:
            batch = self._images.with_pixels(odd, 0., _BRIGHTEST)
            yield from self._try(
                'pixels repaired', 'with its pixels brought within 0 to 255',
                Request(batch=batch, until=found.failed))
        elif self.is_open and not blamed and self._is_normalised_oddly():
            yield from self._normalised()

    def _is_normalised_oddly(self) -> bool:
        std = getattr(self._ground.normaliser, 'std', None)
        pixels = [tensor for _, tensor in self._images.pixels()]
        if std is None or not pixels or std.numel() != len(_STD):
            return False
        largest = max(float(tensor.abs().max()) for tensor in pixels
                      if tensor.numel())
        smallest = float(std.abs().min())
        return smallest == 0 or largest / smallest > _ODD

    def _normalised(self) -> Asked:
        found = self._found
        pixels = [tensor for _, tensor in self._images.pixels()]
        bright = any(float(tensor.max()) > 2 for tensor in pixels)
        unit = 1. if bright else _BRIGHTEST
        values = ([round(value / unit, 6) for value in _MEAN],
                  [round(value / unit, 6) for value in _STD])
        helped = yield from self._try(
            'normalised', "with ImageNet's mean and standard deviation for "
            f'pixels from 0 to {255 if bright else 1}',
            Request(normalised=values))
        if helped is not None:
            found.normalised = values
            if helped.failed is None:
                found.proven.add('normalised')

    def precisions(self) -> Asked:
        """In fp32: losses, heads, this part, all."""
        found, ground = self._found, self._ground
        origin = found.origin
        in_loss = origin is not None and origin.site.in_loss
        if not self.is_open:
            return
        if not ground.half:
            if 'first' in found.replays:
                found.replays['all in fp32'] = Replay(False, (
                    'the run is in full precision, and weights do not move '
                    'in a replay: it comes all the same'))
            if in_loss or found.failed == 'grads':
                yield from self._mended()
            return
        modes = ('losses', 'heads') if ground.fp32 is None else ('heads', )
        if in_loss and ground.fp32 != 'heads':
            for mode in modes:
                helped = yield from self._try(
                    f'{mode} in fp32', f'with {mode} in fp32',
                    Request(fp32=(mode, )))
                if helped is not None:
                    found.mode = mode
                    self._note_finite(f'{mode} in fp32', helped)
                    return
        if (yield from self._part()):
            return
        helped = yield from self._try(
            'all in fp32', 'with everything in fp32 and weights held still',
            Request(fp32=('all', ), until=found.failed))
        if helped is not None:
            helped = yield from self._try(
                'bfloat16', 'in bfloat16', Request(fp32=('bfloat16', )))
            if helped is not None:
                self._note_finite('bfloat16', helped)

    def _mended(self) -> Asked:
        """The formulas of the fp32 regions, in a run of full precision."""
        helped = yield from self._try(
            'losses mended', 'with the formulas of the Fp32 losses',
            Request(fp32=('losses', )))
        if helped is not None:
            self._note_finite('losses mended', helped)

    def _note_finite(self, name: str, outcome: Outcome) -> None:
        found = self._found
        if outcome.failed is None and outcome.norm is not None:
            found.proven.add(name)
            found.norm = outcome.norm
            found.replays[name].words += (
                f'; the gradient norm is {found.norm:.3g}, unscaled')

    def _part(self) -> Generator[Request, Outcome, bool]:
        """The part where it began, and with it a lower loss scale."""
        found, ground = self._found, self._ground
        part = ground.part(found.origin) if found.origin else None
        if part is None:
            return False
        helped = yield from self._try(
            'part in fp32', f'with {part} in fp32', Request(fp32=(part, )))
        if helped is None:
            return False
        found.part = part
        low = ground.lowest
        if helped.failed == 'grads' and ground.scale > low:
            lowered = yield Request(fp32=(part, ), scale=low, gauge=True)
            if lowered.norm is not None and lowered.failed is None:
                helped = lowered
                found.fits = _fitting(ground, low, lowered.filled or 0.)
                found.replays['part in fp32'] = Replay(True, (
                    f'with {part} in fp32 and loss scale {found.fits:g} it '
                    'does not come'))
        self._note_finite('part in fp32', helped)
        return True


_FAILED: dict[str | None, str] = {
    'loss': 'the loss is bad', 'grads': 'gradients are bad',
    'buffers': 'buffers are bad', 'raised': 'the forward raises'}


def _fitting(ground: Ground, low: float, filled: float) -> float:
    """The highest scale, down in steps of the backoff, that fits half.

    Gradients are proportional to the scale: what fills a share of half's
    range at one scale fills it in proportion at another.
    """
    scale = ground.scale
    while scale > low:
        scale *= ground.backoff
        if filled * scale / low < 1:
            break
    return max(scale, low)


def _is_odd(pixels: Any) -> bool:
    return not is_finite(pixels) or bool(
        pixels.abs().max() > _BRIGHTEST + 1)
