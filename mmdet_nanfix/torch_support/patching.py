"""Replace attributes of torch, of the hosts and of modules, and undo it.

Whatever the package replaces it replaces here: docs/patches.md lists it.

One attribute may be replaced several times, by several threads; each wrapper
is given what it stands over. What is undone in the middle leaves no trace:
the wrappers above it are made again, over what is below.
"""
from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, NamedTuple

__all__ = ['Patches', 'Replaced', 'replaced']

_ABSENT: Any = object()


class Replaced(NamedTuple):
    """Name an attribute that is not the original right now.

    Attributes:
        owner: Who has replaced it.
        place: The module, class or object that has it.
        name: Its name.
    """

    owner: str
    place: Any
    name: str


class _Layer:
    """Keep one replacement, with what it stands over."""

    def __init__(self, what: Replaced, make: Callable[[Any], Any]) -> None:
        self.what = what
        self.below = self.value = _ABSENT
        self._make = make
        self._made: list[tuple[Any, Any]] = []

    def stand_over(self, below: Any) -> None:
        """Make the value, or take the one made for the same before."""
        original = below if below is not _ABSENT else _inherited(self.what)
        # For compiled code, the same again when what is below comes back.
        value = next((value for known, value in self._made
                      if known is original), None)
        if value is None:
            value = self._make(original)
        # For compiled code, the same again when what is below comes back.
        self._made = [*[pair for pair in self._made
                        if pair[0] is not original][-1:], (original, value)]
        self.below = below
        self.value = below if value is original else value


# From the lowest up, by name and id of the place, which a layer keeps alive.
_LAYERS: dict[tuple[int, str], list[_Layer]] = {}
# A finalizer may undo patches while this thread makes others.
_LOCK = threading.RLock()


def replaced() -> list[Replaced]:
    """Return what is replaced in this process right now."""
    with _LOCK:
        return [layer.what for layers in list(_LAYERS.values())
                for layer in layers]


def _own(what: Replaced) -> Any:
    """Return an attribute as the place itself has it, not a base of it."""
    return vars(what.place).get(what.name, _ABSENT)


def _inherited(what: Replaced) -> Any:
    """Return what an attribute is where the place itself has none."""
    own = _own(what)
    if own is not _ABSENT:
        _store(what, _ABSENT)
    value = getattr(what.place, what.name, None)
    if own is not _ABSENT:
        _store(what, own)
    return value


def _store(what: Replaced, value: Any) -> None:
    _, place, name = what
    if not isinstance(place, type):
        # Past a ``__setattr__``, as modules have it.
        if value is _ABSENT:
            vars(place).pop(name, None)
        else:
            vars(place)[name] = value
    elif value is not _ABSENT:
        setattr(place, name, value)
    elif name in vars(place):
        delattr(place, name)


def _restack(what: Replaced, index: int, old: Any, new: Any) -> None:
    """Let the layers from an index on stand over something else.

    Args:
        what: The attribute.
        index: Of the lowest of these layers.
        old: What they stand over. A stranger's replacement in between, or
            above them, stays.
        new: What they shall stand over.
    """
    layers = _LAYERS[id(what.place), what.name]
    for layer in layers[index:]:
        if layer.below is not old:
            return
        old = layer.value
        layer.stand_over(new)
        new = layer.value
    if not layers:
        del _LAYERS[id(what.place), what.name]
    elif _own(what) is not old:
        return
    _store(what, new)


class Patches:
    """Replace attributes, and undo all of it in reverse order.

    As a context manager, at the end of the region. All methods may be called
    from any thread.

    Args:
        owner: Who replaces, for :func:`replaced`.
        innermost: Whether these stand below all others, so that a wrapper
            that was there before, or comes from elsewhere, wraps them too.

    Example:
        >>> with Patches('a test') as patches:
        ...     patches.replace(math, 'pi', 3)
        ...     math.pi
        3
    """

    def __init__(self, owner: str, innermost: bool = False) -> None:
        self._owner = owner
        self._innermost = innermost
        self._layers: list[_Layer] = []
        self._owners = 0

    def replace(self, place: Any, name: str, value: Any) -> None:
        """Set an attribute; where the place itself had none, until undone.

        Args:
            place: A module, a class, or an object with a ``__dict__``.
            name: Of the attribute.
            value: To have in its place; in a class as it is stored there
                (``staticmethod(...)``).
        """
        self.wrap(place, name, lambda original: value)

    def wrap(self, place: Any, name: str,
             make: Callable[[Any], Any]) -> None:
        """Replace an attribute by what is made of it.

        Args:
            place: As for :meth:`replace`.
            name: Likewise.
            make: Takes the original, as it is stored in the place, or else
                as the place inherits it, or None; returns what to have in
                its place. The original itself means: nothing to replace.
                Called again when what is below changes.
        """
        what = Replaced(self._owner, place, name)
        layer = _Layer(what, make)
        with _LOCK:
            while True:
                below = self._below(what)
                layer.stand_over(below)
                # A finalizer may have undone another in the meantime.
                if self._below(what) is below:
                    break
            if layer.value is not below:
                layers = _LAYERS.setdefault((id(place), name), [])
                index = 0 if self._innermost else len(layers)
                layers.insert(index, layer)
                self._layers.append(layer)
                _restack(what, index + 1, below, layer.value)

    def _below(self, what: Replaced) -> Any:
        """Return what a new layer stands over."""
        layers = _LAYERS.get((id(what.place), what.name))
        return layers[0].below if layers and self._innermost else _own(what)

    def hold(self, owner: Any) -> None:
        """Undo all when this and every other such owner is gone.

        Args:
            owner: Whatever can be referred to weakly.
        """
        with _LOCK:
            self._owners += 1
        weakref.finalize(owner, self._let_go).atexit = False

    def _let_go(self) -> None:
        with _LOCK:
            self._owners -= 1
            if self._owners == 0:
                self.undo()

    def undo(self) -> None:
        """Put back what was there, latest first; without any, do nothing."""
        with _LOCK:
            while self._layers:
                layer = self._layers.pop()
                layers = _LAYERS[id(layer.what.place), layer.what.name]
                index = layers.index(layer)
                del layers[index]
                _restack(layer.what, index, layer.value, layer.below)

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.undo()
