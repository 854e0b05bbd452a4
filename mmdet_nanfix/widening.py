"""What a training computes in fp32 right now: regions, parts, all of it."""
from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

from torch import nn

from . import fp32_parts, regions
from .loss_formulas import exact_cost, finite_forward
from .sticky import StickyParts

__all__ = ['Widening']

# Of what a request computes in fp32, what is no part of the model.
_NO_PARTS = ('losses', 'heads', 'all', 'bfloat16')


class Widening:
    """The regions and parts of one model that run in fp32.

    Args:
        model: The bare model.
        mode: Which regions run in fp32, of :data:`.regions.MODES`.
        device: Type of the device whose autocast is left.
        sticky: Parts that stay in fp32.

    Attributes:
        more: What is in fp32 beside that, during a replay.

    Raises:
        ValueError: A part that the model does not have.
    """

    def __init__(self, model: nn.Module, mode: str | None, device: str,
                 sticky: StickyParts) -> None:
        self._model = model
        self._mode = mode
        self._device = device
        self._sticky = sticky
        self._parts: dict[str, fp32_parts.Part] = {}
        self.more: tuple[str, ...] = ()
        known = dict(model.named_modules())
        for name in sticky.given:
            if name not in known:
                raise ValueError(
                    'Expected setting `fp32_modules` to name modules of the '
                    f'{type(model).__name__}, but it has no {name!r}; it has '
                    f'{", ".join(dict(model.named_children()))} and below')
        if mode is not None:
            self._install()

    def _install(self) -> None:
        regions.install(self._model, finite_forward, exact_cost)

    def forget(self) -> list[str]:
        """Drop what stays in fp32 by a checkpoint of another model.

        Returns:
            Names that are no modules of this one.
        """
        return self._sticky.forget(
            {*dict(self._model.named_modules()), *_NO_PARTS})

    @contextlib.contextmanager
    def at(self, fp32: Sequence[str]) -> Iterator[None]:
        """Region in which more is in fp32.

        Args:
            fp32: As for :class:`.replay.Request`.
        """
        before, self.more = self.more, tuple(fp32)
        if fp32:
            self._install()
        try:
            yield
        finally:
            self.more = before

    def switched(self) -> Any:
        """Region of a forward or a backward."""
        names = [*self.more, *self._sticky.names]
        if not names:
            return regions.switched(self._mode, self._device)
        mode = self._mode
        for wider in ('losses', 'heads'):
            if wider in names and mode != 'heads':
                mode = wider
        return fp32_parts.switched(mode, self._device, [
            self._part(name) for name in names if name not in _NO_PARTS])

    def _part(self, name: str) -> fp32_parts.Part:
        if name not in self._parts:
            # Its losses are regions within.
            self._install()
            self._parts[name] = fp32_parts.install_part(
                self._model.get_submodule(name))
        return self._parts[name]
