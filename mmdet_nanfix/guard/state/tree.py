"""Remember what hangs below a model at every step, at little cost.

A whole look (:class:`.Snapshot`) walks through all modules: 12 ms for 2,000
of them. What hangs there is nearly always the same as the step before, so
that it is enough to read what can be bound to something else, and to look
again as a whole when something is.
"""
from __future__ import annotations

import contextlib
import dataclasses
import operator
from itertools import chain
from typing import Any, Callable, Iterable, Iterator

import numpy as np
from torch import Tensor, nn

from .snapshot import ATOMS, INTERNAL, Diff, Snapshot, elements, same, undo_of

__all__ = ['StateTree', 'TreeSnapshot']

# So many times it is looked at as a whole at first (lazy modules), and every
# so many steps.
_FIRST, _EVERY = 2, 500


def _is_atom(value: Any) -> bool:
    return type(value) in ATOMS or type(value) is tuple and all(
        map(_is_atom, value))


def _are_atoms(held: Any) -> bool:
    """Whether a list, set or dict holds numbers and the like alone."""
    return all(map(_is_atom, chain(held, held.values()) if isinstance(
        held, dict) else held))


class _Names:
    """Attributes of some dicts, read by one call of C for each dict."""

    def __init__(self) -> None:
        self.spaces: list[dict[str, Any]] = []
        self.names: list[tuple[str, ...]] = []
        self._read: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        self._getters: dict[tuple[str, ...], Callable[[Any], Any]] = {}

    def add(self, space: dict[str, Any], names: Iterable[str]) -> None:
        """Read these of a dict from now on."""
        wanted = tuple(names)
        if not wanted:
            return
        # Of one name there would be no tuple.
        wanted = wanted if len(wanted) > 1 else wanted * 2
        get = self._getters.setdefault(wanted, operator.itemgetter(*wanted))
        self.spaces.append(space)
        self.names.append(wanted)
        self._read.append((get, space))

    def values(self) -> list[Any]:
        """Their values now, a tuple for each dict.

        Raises:
            KeyError: One of them is gone.
        """
        return [get(space) for get, space in self._read]


def _are(left: Iterable[Iterable[Any]], right: Iterable[Iterable[Any]]
         ) -> bool:
    """Whether these hold the same objects; of equal lengths."""
    return all(map(operator.is_, chain.from_iterable(left),
                   chain.from_iterable(right)))


class _Plan:
    """Where below a model something can change, by a whole look.

    Args:
        full: The look.
        rebound: Attributes that are bound to another object all the time: by
            what they are of, and their names.
    """

    def __init__(self, full: Snapshot,
                 rebound: Iterable[tuple[dict[str, Any], str]] = ()) -> None:
        self.full = full
        self.atoms, self.objects = _Names(), _Names()
        self.rebound = _Names()
        for space, name in rebound:
            self.rebound.add(space, [name])
        apart = set(zip(map(id, self.rebound.spaces),
                        (names[0] for names in self.rebound.names)))
        for space, then in full.spaces:
            if id(space) in full.layers:
                self.atoms.add(space, ['training'])
                continue
            own = [name for name in then if name not in INTERNAL
                   and (id(space), name) not in apart]
            self.atoms.add(space, [
                name for name in own if _is_atom(then[name])])
            self.objects.add(space, [
                name for name in own if not _is_atom(then[name])])
        named = set(map(id, full.named))
        self.plain: list[Any] = []
        self.others: list[Any] = []
        self.held: list[Any] = []
        self.kept: list[Any] = []
        for container, held in full.containers:
            if id(container) in named:
                continue
            plain = type(container) in (list, dict, set) and _are_atoms(held)
            (self.plain if plain else self.others).append(container)
            (self.held if plain else self.kept).append(held)
        self._sized = [*(space for space, _ in full.spaces), *full.named]
        self._lengths = list(map(len, self._sized))
        self._filled = [item for item in full.named if item]
        self._children = [list(item.values()) for item in self._filled]
        self.were = self.atoms.values(), self.objects.values()

    def has(self, objects: list[Any]) -> bool:
        """Whether the same objects hang there as in the look.

        Args:
            objects: Values of the attributes that are objects, now.
        """
        return list(map(len, self._sized)) == self._lengths and _are(
            map(dict.values, self._filled), self._children) and _are(
                objects, self.were[1]) and all(map(
                    same, self.kept, map(elements, self.others)))


def _others(names: _Names, then: list[Any], now: list[Any]
            ) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """Attributes that are others now: where, name, before and after."""
    for index, (old, new) in enumerate(zip(then, now)):
        if not all(map(operator.is_, old, new)):
            yield from {name: (names.spaces[index], name, left, right)
                        for name, left, right in zip(
                            names.names[index], old, new)
                        if left is not right}.values()


class StateTree:
    """What hangs below a model and can hold state.

    Read at every step: attributes of modules and of objects that they hold,
    but for torch's own layers, which rebind nothing but ``training``; the
    buffers and children of modules; containers. What appears later shows in
    the length of an attribute dict or container, what is bound to another
    object by its identity. Attributes and containers that hold other objects
    after each forward, such as the last sampling results, are known after the
    first time, and what hangs below them is walked through at each step.

    Args:
        model: The model; nothing is left on it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._looks = self._age = 0
        self._plan = _Plan(Snapshot())
        # By their ids, which are theirs as long as they are here.
        self._loose: dict[int, Any] = {}
        self._rebound: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}

    def snapshot(self) -> Snapshot | TreeSnapshot:
        """Remember everything as it is now; no device sync."""
        self._age += 1
        if self._looks >= _FIRST and self._age < _EVERY and not (
                self._plan.full.opaque):
            quick = self._quick(self._plan)
            if quick is not None:
                return quick
            self._learn(self._plan)
        elif self._age >= _EVERY:
            self._loose, self._rebound = {}, {}
        full = Snapshot.of([self._model])
        # What is gone by now is let go of.
        held = {id(container) for container, _ in full.containers}
        spaces = {id(space) for space, _ in full.spaces}
        self._loose = {key: container for key, container
                       in self._loose.items() if key in held}
        self._rebound = {key: place for key, place in self._rebound.items()
                         if key[0] in spaces and key[1] in place[0]}
        apart = [*self._loose.values(), *(
            space[name] for space, name in self._rebound.values())]
        self._plan = _Plan(Snapshot.of([self._model], besides=apart) if (
            apart) else full, self._rebound.values())
        self._looks, self._age = self._looks + 1, 0
        return full

    def _learn(self, plan: _Plan) -> None:
        """Know apart what holds other objects than at the last look."""
        with contextlib.suppress(KeyError):
            objects = zip(plan.objects.spaces, plan.objects.names,
                          plan.objects.values(), plan.were[1])
            for space, names, now, then in objects:
                self._rebound.update({
                    (id(space), name): (space, name)
                    for name, new, old in zip(names, now, then)
                    if new is not old})
        self._loose.update({
            id(container): container for container, held
            in zip(plan.others, plan.kept)
            if not same(held, elements(container))})

    def _quick(self, plan: _Plan) -> TreeSnapshot | None:
        """What is there now, where nothing else hangs there than before."""
        try:
            atoms, objects = plan.atoms.values(), plan.objects.values()
            if not plan.has(objects):
                return None
            if atoms != plan.were[0] and not all(
                    now == then or all(map(_is_atom, now))
                    for now, then in zip(atoms, plan.were[0])):
                return None
            if plan.plain != plan.held:
                held = list(map(elements, plan.plain))
                if not all(now == then or _are_atoms(now)
                           for now, then in zip(held, plan.held)):
                    return None
                plan.held = held
            rebound = plan.rebound.values()
        except Exception:
            # An attribute is gone, or was bound to something that cannot be
            # compared, such as a tensor.
            return None
        plan.were = atoms, objects
        full = plan.full
        loose = Snapshot.of([*self._loose.values(),
                             *chain.from_iterable(rebound)])
        return TreeSnapshot(
            plan, atoms, objects, rebound, plan.held, loose, full.tensors,
            loose.tensors, [*((array, array.copy())
                              for array, _ in full.arrays), *loose.arrays],
            [*full.buffers, *loose.buffers] if loose.buffers else (
                full.buffers),
            [*map(undo_of, full.generators), *loose.undos])


@dataclasses.dataclass
class TreeSnapshot:
    """What hangs below a model at one moment, as far as it can change.

    Attributes:
        plan: Where that is.
        atoms: Values of attributes that are numbers and the like.
        objects: Those of all other attributes, but for these:
        rebound: Those that hold other objects all the time.
        held: What containers of numbers and the like hold.
        loose: What hangs below ``rebound``, and below containers like these.
        tensors: As of :class:`.Snapshot`, and so are the rest.
    """

    plan: _Plan
    atoms: list[Any]
    objects: list[Any]
    rebound: list[Any]
    held: list[Any]
    loose: Snapshot
    tensors: list[Tensor]
    more: list[Tensor]
    arrays: list[tuple[np.ndarray, np.ndarray]]
    buffers: list[dict[str, Any]]
    undos: list[Callable[[], None]]

    def diff(self) -> Diff:
        """What has become different since, but for values of tensors."""
        plan, found = self.plan, None
        try:
            now = plan.atoms.values()
            if plan.has(plan.objects.values()) and plan.plain == self.held:
                found = Diff([*_others(plan.atoms, self.atoms, now), *_others(
                    plan.rebound, self.rebound, plan.rebound.values())])
        except Exception:
            # As in a snapshot: then the whole is compared.
            found = None
        found = found or self._whole().diff()
        below = self.loose.diff()
        return Diff(found.names + below.names,
                    found.elements + below.elements, self.undos)

    def _whole(self) -> Snapshot:
        plan, full = self.plan, self.plan.full
        then: dict[int, dict[str, Any]] = {}
        for names, values in ((plan.atoms, self.atoms),
                              (plan.objects, self.objects),
                              (plan.rebound, self.rebound)):
            for space, own, found in zip(names.spaces, names.names, values):
                then.setdefault(id(space), {}).update(zip(own, found))
        spaces = []
        for space, before in full.spaces:
            known = then.get(id(space), {})
            if id(space) in full.layers:
                # All else is as it is now, or new.
                known = {**{name: space[name] for name in before
                            if name in space}, **known}
            spaces.append((space, known))
        named = set(map(id, full.named))
        return Snapshot(spaces, [
            *(pair for pair in full.containers if id(pair[0]) in named),
            *zip(plan.plain, self.held), *zip(plan.others, plan.kept)])
