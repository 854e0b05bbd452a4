"""Try what would have helped the step that failed.

Each experiment changes one thing; weights, buffers, batch and random numbers
are those of the failed step.
"""
from __future__ import annotations

from typing import Any, Callable

from ..guard.checks import is_finite
from .context import RunContext
from .findings import (
    Asking,
    Counterfactual,
    Experiment,
    Failure,
    Findings,
    ReplayResult,
)
from .replay.batch_view import BatchView
from .replay.op_record import OpRecord
from .replay.request import ReplayRequest

__all__ = ['Counterfactuals']

#: Value of one loss term against all others together, and the least that
#: is blamed: every loss of about 1 is one to train with.
DOMINANT = 1000.
#: The same against its own median in the steps before.
GROWN = 10.
# ImageNet's, for pixels from 0 to 255, red first.
_MEAN, _STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
# A pixel above is no 8-bit number; normalised, one above this is no pixel.
_BRIGHTEST, _ODD = 255., 1000.


class Counterfactuals:
    """The experiments on one failed step.

    Args:
        view: The failing batch.
        context: Of the run.
        found: Is filled in.
        part_of: Gives the part of the model where an operation was.
    """

    def __init__(self, view: BatchView, context: RunContext,
                 found: Findings,
                 part_of: Callable[[OpRecord], str | None]) -> None:
        self._view = view
        self._context = context
        self._found = found
        self._part_of = part_of

    @property
    def settled(self) -> bool:
        """Whether a lower scale is enough, with a gradient like any."""
        found = self._found
        return found.fits is not None and found.norm is not None and (
            self._context.sane(found.norm) is not False)

    @property
    def saves(self) -> bool:
        """Whether the step is made again at once, which is a control."""
        found, context = self._found, self._context
        return context.can_retry and found.norm is not None and (
            context.sane(found.norm) is True)

    @property
    def helped(self) -> bool:
        """Whether more precision in a part of the model has helped."""
        return self._found.cured(Counterfactual.LOSSES_FP32,
                                 Counterfactual.HEADS_FP32,
                                 Counterfactual.PART_FP32)

    @property
    def cured(self) -> bool:
        """Whether something that was changed has helped."""
        return self._found.cured(*(name for name in Counterfactual
                                   if name is not Counterfactual.FIRST))

    @property
    def input_is_odd(self) -> bool:
        """Whether pixels, or what they are normalised with, look bad."""
        return self._is_normalised_oddly() or any(
            tensor.is_floating_point() and _is_odd(tensor)
            for _, tensor in self._view.pixels())

    @property
    def is_open(self) -> bool:
        """Whether what is to blame is not known yet."""
        return self._found.given is None and not self.cured

    def _try(self, name: Counterfactual, words: str, request: ReplayRequest
             ) -> Asking[ReplayResult | None]:
        """Ask for one, and note whether the failure came.

        Returns:
            The result where it did not come; None where it did, or where
            the replay could not be made.
        """
        first = self._found.result
        result = yield request
        if result.error is not None or first is None:
            self._found.tests.append(f'{name.value}: not made, the replay '
                                     f'{result.error}')
            return None
        cured = result.is_past(first)
        after = '' if not cured or result.failed is None else (
            f', but then {_FAILED[result.failed]}')
        came = 'does not come' if cured else 'comes as well'
        self._found.experiments[name] = Experiment(
            cured, f'{words} it {came}{after}')
        return result if cured else None

    def may_be_half(self, suspects: bool) -> bool:
        """Tell if nothing in the batch looks bad: then fp32 comes first.

        What that helps is no image's fault.

        Args:
            suspects: Whether annotations look bad.
        """
        context = self._context
        return context.can_widen and context.half and not (
            suspects or self.input_is_odd)

    def again(self) -> Asking[None]:
        """Try once more with nothing changed: the control."""
        first = self._found.result
        result = yield ReplayRequest(until=self._found.failed)
        if result.error is None and first is not None:
            cured = result.failed is None or result.is_past(first)
            self._found.experiments[Counterfactual.AGAIN] = Experiment(
                cured, 'once more with nothing changed it '
                f'{"does not come" if cured else "comes"}')

    def scales(self) -> Asking[None]:
        """One term of the loss lowered; all of it lowered."""
        found, context = self._found, self._context
        if context.can_widen and (yield from self._lowered_term()):
            return
        if not context.half or context.scale <= context.lowest:
            return
        low = context.lowest
        result = yield from self._try(
            Counterfactual.LOWER_SCALE, f'at loss scale {low:g}',
            ReplayRequest(scale=low, gauge=True))
        if result is None or result.norm is None:
            return
        found.norm = result.norm
        found.fits = context.fitting(result.filled or 0.)
        words = f'at loss scale {found.fits:g} it does not come'
        sane = context.sane(result.norm)
        if not (sane and context.can_retry) and context.alone:
            # Else the step itself shows it.
            result = yield ReplayRequest(scale=found.fits)
            if result.failed is not None or result.error is not None:
                words = (f'at loss scale {low:g} it does not come, at '
                         f'{found.fits:g} it does')
                found.fits = low
        found.experiments[Counterfactual.LOWER_SCALE] = Experiment(True, (
            f'{words}; the gradient norm is {found.norm:.3g}, unscaled'))

    def _lowered_term(self) -> Asking[bool]:
        """The one term that is much larger than the others."""
        result = self._found.result
        values = {key: abs(value) for key, value in (
            result.losses if result else {}).items()}
        if len(values) < 2:
            return False
        key = max(values, key=lambda name: values[name])
        others = sum(values.values()) - values[key]
        if values[key] < DOMINANT * max(others, 1.):
            return False
        usual = self._context.usual_loss(key)
        if others == 0 or usual is not None and values[key] < GROWN * usual:
            # With this one the run has gone on well so far.
            return False
        factor = 10. ** -len(str(int(values[key] / others)))
        helped = yield from self._try(
            Counterfactual.TERM_LOWERED,
            f'with {key} ({values[key]:.3g}, all others {others:.3g}) times '
            f'{factor:g}', ReplayRequest(factors={key: factor}))
        if helped is None:
            return False
        self._found.term = key, factor
        if helped.failed is None:
            self._found.proven.add(Counterfactual.TERM_LOWERED)
        return True

    def pixels(self) -> Asking[None]:
        """Pixels within 0 to 255; another mean and standard deviation."""
        found = self._found
        if found.given is not None or found.cured(
                Counterfactual.ANNOTATION_REPAIRED):
            return
        blamed = [item['img_path'] for item in found.images or ()]
        odd = [image for image, tensor in self._view.pixels()
               if image.to_image()['img_path'] in blamed and (
                   tensor.is_floating_point() and _is_odd(tensor))]
        if odd:
            batch = self._view.with_pixels(odd, 0., _BRIGHTEST)
            yield from self._try(
                Counterfactual.PIXELS_REPAIRED,
                'with its pixels brought within 0 to 255',
                ReplayRequest(batch=batch, until=found.failed))
        elif self.is_open and not blamed and self._is_normalised_oddly():
            yield from self._normalised()

    def _is_normalised_oddly(self) -> bool:
        std = getattr(self._context.normaliser, 'std', None)
        pixels = [tensor for _, tensor in self._view.pixels()]
        if std is None or not pixels or std.numel() != len(_STD):
            return False
        largest = max(float(tensor.abs().max()) for tensor in pixels
                      if tensor.numel())
        smallest = float(std.abs().min())
        return smallest == 0 or largest / smallest > _ODD

    def _normalised(self) -> Asking[None]:
        found = self._found
        pixels = [tensor for _, tensor in self._view.pixels()]
        bright = any(float(tensor.max()) > 2 for tensor in pixels)
        unit = 1. if bright else _BRIGHTEST
        values = ([round(value / unit, 6) for value in _MEAN],
                  [round(value / unit, 6) for value in _STD])
        helped = yield from self._try(
            Counterfactual.NORMALISED,
            "with ImageNet's mean and standard deviation for "
            f'pixels from 0 to {255 if bright else 1}',
            ReplayRequest(normalised=values))
        if helped is not None:
            found.normalised = values
            if helped.failed is None:
                found.proven.add(Counterfactual.NORMALISED)

    def precisions(self) -> Asking[None]:
        """In fp32: losses, heads, this part, all."""
        found, context = self._found, self._context
        origin = found.origin
        in_loss = origin is not None and origin.site.in_loss
        if not self.is_open:
            return
        if not context.half:
            if Counterfactual.FIRST in found.experiments:
                found.experiments[Counterfactual.ALL_FP32] = Experiment(
                    False, 'the run is in full precision, and weights do not '
                    'move in a replay: it comes all the same')
            if in_loss or found.failed == Failure.GRADS:
                yield from self._mended()
            return
        modes = ('losses', 'heads') if context.fp32 is None else ('heads', )
        if in_loss and context.fp32 != 'heads':
            for mode in modes:
                helped = yield from self._try(
                    Counterfactual.of_mode(mode), f'with {mode} in fp32',
                    ReplayRequest(precision=(mode, )))
                if helped is not None:
                    found.mode = mode
                    self._note_finite(Counterfactual.of_mode(mode), helped)
                    return
        if (yield from self._part()):
            return
        helped = yield from self._try(
            Counterfactual.ALL_FP32,
            'with everything in fp32 and weights held still',
            ReplayRequest(precision=('all', ), until=found.failed))
        if helped is not None:
            helped = yield from self._try(
                Counterfactual.BFLOAT16, 'in bfloat16',
                ReplayRequest(precision=('bfloat16', )))
            if helped is not None:
                self._note_finite(Counterfactual.BFLOAT16, helped)

    def _mended(self) -> Asking[None]:
        """The formulas of the fp32 regions, in a run of full precision."""
        helped = yield from self._try(
            Counterfactual.LOSSES_MENDED,
            'with the formulas of the Fp32 losses',
            ReplayRequest(precision=('losses', )))
        if helped is not None:
            self._note_finite(Counterfactual.LOSSES_MENDED, helped)

    def _note_finite(self, name: Counterfactual, result: ReplayResult) -> None:
        found = self._found
        if result.failed is None and result.norm is not None:
            found.proven.add(name)
            found.norm = result.norm
            found.experiments[name].words += (
                f'; the gradient norm is {found.norm:.3g}, unscaled')

    def _part(self) -> Asking[bool]:
        """The part where it began, and with it a lower loss scale."""
        found, context = self._found, self._context
        part = self._part_of(found.origin) if found.origin else None
        if part is None:
            return False
        helped = yield from self._try(
            Counterfactual.PART_FP32, f'with {part} in fp32',
            ReplayRequest(precision=(part, )))
        if helped is None:
            return False
        found.part = part
        low = context.lowest
        if helped.failed == Failure.GRADS and context.scale > low:
            lowered = yield ReplayRequest(precision=(part, ), scale=low,
                                          gauge=True)
            if lowered.norm is not None and lowered.failed is None:
                helped = lowered
                found.fits = context.fitting(lowered.filled or 0.)
                found.experiments[Counterfactual.PART_FP32] = Experiment(
                    True, f'with {part} in fp32 and loss scale '
                    f'{found.fits:g} it does not come')
        self._note_finite(Counterfactual.PART_FP32, helped)
        return True


_FAILED = {Failure.LOSS: 'the loss is bad',
           Failure.GRADS: 'gradients are bad',
           Failure.BUFFERS: 'buffers are bad',
           Failure.RAISED: 'the forward raises'}


def _is_odd(pixels: Any) -> bool:
    return not is_finite(pixels) or bool(
        pixels.abs().max() > _BRIGHTEST + 1)
