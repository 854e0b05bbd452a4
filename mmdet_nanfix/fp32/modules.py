"""Run whole modules of a model in fp32: a head, a neck, a stage.

Like regions they are wrapped in the classes, and
are what they were until :func:`switched` says otherwise.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Callable, Iterator, Sequence

from torch import nn

from ..torch_support import Patches, not_compiled
from . import wrapping
from .cast import widened

__all__ = ['Fp32Module', 'install_module', 'switched']

_MARK = f'{wrapping.MARK}_of_a_part'

Method = Callable[..., Any]


@dataclasses.dataclass
class Fp32Module:
    """Name what runs in fp32 where a module does as a whole.

    Attributes:
        ids: ``id`` of each module whose class is wrapped.
        layers: Modules of torch's own classes, which are not.
    """

    ids: frozenset[int]
    layers: list[nn.Module]


@contextlib.contextmanager
def switched(mode: str | None, device: str, parts: Sequence[Fp32Module]
             ) -> Iterator[None]:
    """Let whole modules run in fp32 beside the regions.

    Args:
        mode: As for :func:`.wrapping.switched`.
        device: Likewise.
        parts: Of :func:`install_module`.
    """
    with Patches('fp32 modules') as patches, wrapping.switched(
            mode, device, frozenset().union(*[part.ids for part in parts])):
        for layer in [layer for part in parts for layer in part.layers]:
            if 'forward' not in vars(layer):
                patches.replace(layer, 'forward', functools.partial(
                    _call, type(layer).forward, layer))
        yield


def _of_part(original: Method) -> Method:
    """Run in fp32, where the module is one that does so as a whole."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in wrapping.SWITCH.parts:
            return original(self, *args, **kwargs)
        return _call(original, self, *args, **kwargs)

    return call


@not_compiled
def _call(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method in fp32.

    What it puts into lists and dicts among its arguments is kept; what it
    writes into other objects that hold half tensors is not.
    """
    if wrapping.is_inside():
        return original(self, *args, **kwargs)
    wide = widened((args, kwargs))
    copies = list(_copies((args, kwargs), wide))
    out = wrapping.enter(functools.partial(original, self), *wide)
    for given, copy, before in copies:
        _write_back(given, copy, before)
    return out


def _copies(given: Any, copy: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield lists and dicts that were copied, and what the copies held."""
    if copy is given or not isinstance(given, (list, dict, tuple)):
        return
    if isinstance(given, (list, dict)):
        yield given, copy, copy.copy()
    keys = given if isinstance(given, dict) else range(len(given))
    for key in list(keys):
        yield from _copies(given[key], copy[key])


def _write_back(given: Any, copy: Any, before: Any) -> None:
    """Write what was put into a copy; what has stayed is the caller's."""
    keys = list(before) if isinstance(before, dict) else range(len(before))
    own = {id(before[key]): given[key] for key in keys}
    if isinstance(given, list):
        if len(copy) != len(before) or any(
                new is not old for new, old in zip(copy, before)):
            given[:] = [own.get(id(item), item) for item in copy]
        return
    for key in [key for key in keys if key not in copy]:
        del given[key]
    for key, value in copy.items():
        if key not in before or before[key] is not value:
            given[key] = own.get(id(value), value)


def install_module(part: nn.Module) -> Fp32Module:
    """Prepare a part of a model to run in fp32 as a whole.

    Whatever method of it, or of a module below it, is called from outside:
    wrapped in the classes, but for those of torch and MMEngine. Where the
    part itself is a layer of torch, or a container of such, their
    ``forward`` is replaced for the length of a region.

    Args:
        part: A head, a backbone, one loss, one layer.

    Returns:
        What :func:`switched` takes.
    """
    own = [module for module in part.modules()
           if not _is_foreign(type(module))]
    for module in own:
        for base in type(module).__mro__:
            for name in [] if _is_foreign(base) else list(vars(base)):
                if not name.startswith('__'):
                    wrapping.wrap(base, name, _of_part, _MARK)
    return Fp32Module(frozenset(map(id, own)), list(_layers(part)))


def _layers(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost that run a ``forward`` of torch."""
    owner = next(kind for kind in type(part).__mro__
                 if 'forward' in vars(kind))
    if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
        for child in part.children():
            yield from _layers(child)
    elif _is_foreign(owner):
        yield part


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition('.')[0] in ('builtins', 'torch',
                                                 'mmengine', 'abc')
