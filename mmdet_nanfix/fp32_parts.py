"""Parts of a model that run in fp32 as a whole: a head, a neck, a stage.

Like regions they are wrapped in the classes, for the life of the process, and
are what they were until :func:`switched` says otherwise.
"""
import contextlib
import dataclasses
import functools
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
)

from torch import nn

from . import regions
from .precision import widened

__all__ = ['Part', 'install_part', 'switched']

_MARK = f'{regions.MARK}_of_a_part'

Method = Callable[..., Any]


@dataclasses.dataclass
class Part:
    """A part of a model that can run in fp32 as a whole.

    Attributes:
        ids: ``id`` of each module whose class is wrapped.
        layers: Modules of torch's own classes, which are not.
    """

    ids: FrozenSet[int]
    layers: List[nn.Module]


@contextlib.contextmanager
def switched(mode: Optional[str], device: str, parts: Sequence[Part]
             ) -> Iterator[None]:
    """Let parts count beside the regions.

    Args:
        mode: As for :func:`.regions.switched`.
        device: Likewise.
        parts: Of :func:`install_part`.
    """
    layers = [layer for part in parts for layer in part.layers
              if 'forward' not in vars(layer)]
    for layer in layers:
        vars(layer)['forward'] = functools.partial(
            _call, type(layer).forward, layer)
    try:
        with regions.switched(mode, device, frozenset().union(
                *[part.ids for part in parts])):
            yield
    finally:
        for layer in layers:
            vars(layer).pop('forward', None)


def _of_part(original: Method) -> Method:
    """All in fp32, where the module is one that runs so as a whole."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in regions.SWITCH.parts:
            return original(self, *args, **kwargs)
        return _call(original, self, *args, **kwargs)

    return call


def _call(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method in fp32; what it writes into arguments is kept."""
    if regions.is_inside():
        return original(self, *args, **kwargs)
    wide = widened((args, kwargs))
    pairs = list(_containers((args, kwargs), wide))
    try:
        return regions.enter(functools.partial(original, self), *wide)
    finally:
        for given, copy, entries in pairs:
            _write_back(given, copy, entries)


def _containers(given: Any, copies: Any
                ) -> Iterator[Tuple[Any, Any, Dict[Any, Any]]]:
    """Lists and dicts among arguments that were copied, with entries."""
    (args, kwargs), (wide, named) = given, copies
    pairs = [*zip(args, wide), *((kwargs[key], named[key])
                                 for key in kwargs)]
    for value, copy in pairs:
        if copy is not value and isinstance(copy, (list, dict)):
            yield value, copy, dict(_entries(copy))


def _entries(value: Any) -> Iterable[Tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else (
        list(enumerate(value)))


def _write_back(given: Any, copy: Any, before: Dict[Any, Any]) -> None:
    """What a part has put into a copy, for the caller to see."""
    after = dict(_entries(copy))
    if len(after) != len(before) and isinstance(given, list):
        given[:] = [given[key] if key in before and key < len(given)
                    and before[key] is value else value
                    for key, value in after.items()]
        return
    for key, value in after.items():
        if key not in before or before[key] is not value:
            given[key] = value


def install_part(part: nn.Module) -> Part:
    """Make ready that a part of a model can run in fp32 as a whole.

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
                    regions.wrap(base, name, _of_part, _MARK)
    return Part(frozenset(map(id, own)), list(_layers(part)))


def _layers(part: nn.Module) -> Iterator[nn.Module]:
    """The outermost layers of torch that no method of the part holds."""
    if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
        for child in part.children():
            yield from _layers(child)
    elif _is_foreign(type(part)):
        yield part


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition('.')[0] in ('builtins', 'torch',
                                                 'mmengine', 'abc')
