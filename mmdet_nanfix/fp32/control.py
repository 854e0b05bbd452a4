"""Say what a training computes in fp32 right now: regions, modules, all."""
from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

from torch import nn

from . import modules, regions
from .score_losses import exact_cost, finite_forward
from .wrapping import hold_regions

__all__ = ['PrecisionControl']

# Of what a replay computes in fp32, what is no module of the model.
_NO_MODULES = ('losses', 'heads', 'all', 'bfloat16')


class PrecisionControl:
    """Choose the regions and modules of one model that run in fp32.

    Args:
        model: The bare model.
        mode: Which regions run in fp32, of :data:`.wrapping.MODES`.
        device: Type of the device whose autocast is left.
        given: Paths of modules that the config has in fp32.

    Attributes:
        promoted: Paths of all modules that stay in fp32, ``given`` ones
            included.
        extra: What is in fp32 beside that, during a replay or a retry.

    Raises:
        ValueError: A path in ``given`` that the model does not have.
    """

    def __init__(self, model: nn.Module, mode: str | None, device: str,
                 given: Sequence[str] = ()) -> None:
        self._model = model
        self._mode = mode
        self._device = device
        self.promoted: Sequence[str] = tuple(given)
        self._modules: dict[str, modules.Fp32Module] = {}
        self.extra: tuple[str, ...] = ()
        self._holds = False
        known = dict(model.named_modules())
        for name in given:
            if name not in known:
                raise ValueError(
                    'Expected setting `fp32_modules` to name modules of the '
                    f'{type(model).__name__}, but it has no {name!r}; it has '
                    f'{", ".join(dict(model.named_children()))} and below')
        if mode is not None:
            self._install()

    def _install(self) -> None:
        if not self._holds:
            self._holds = True
            hold_regions(self)
        regions.install(self._model, finite_forward, exact_cost)

    @property
    def known(self) -> set[str]:
        """Return what can be in fp32: paths of modules, kinds of regions."""
        return {*dict(self._model.named_modules()), *_NO_MODULES}

    @contextlib.contextmanager
    def with_extra(self, fp32: Sequence[str]) -> Iterator[None]:
        """Enter a region in which more is in fp32.

        Args:
            fp32: ``losses``, ``heads``, ``all``, or paths of modules.
                ``bfloat16`` is another dtype of autocast.
        """
        before, self.extra = self.extra, tuple(fp32)
        if fp32:
            self._install()
        try:
            yield
        finally:
            self.extra = before

    def active(self) -> Any:
        """Return the region of a forward or a backward; no device sync."""
        names = [*self.extra, *self.promoted]
        if not names:
            return regions.switched(self._mode, self._device)
        mode = self._mode
        for wider in ('losses', 'heads'):
            if wider in names and mode != 'heads':
                mode = wider
        return modules.switched(mode, self._device, [
            self._module(name) for name in names if name not in _NO_MODULES])

    def _module(self, name: str) -> modules.Fp32Module:
        if name not in self._modules:
            # Its losses are regions within.
            self._install()
            self._modules[name] = modules.install_module(
                self._model.get_submodule(name))
        return self._modules[name]
