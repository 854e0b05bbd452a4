"""Write changes of a config, and find the places of modules in it."""
from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any, Mapping, Tuple

from torch import nn

__all__ = [
    'LossModules', 'as_config', 'config_place', 'is_loss', 'model_patch',
    'optim_wrapper', 'rounded_down', 'to_hook', 'weight_of'
]

#: Path below ``model`` of a config, and what must stand there besides.
Place = Tuple[str, Mapping[str, Any]]


@dataclasses.dataclass
class LossModules:
    """Modules of a model that compute losses.

    Attributes:
        began: Path of the one where the failure began, or None.
        kind: Its class.
        dominant: Path of the one whose term dominates, or None.
        weight: Its ``loss_weight``, or None.
    """

    began: str | None = None
    kind: str | None = None
    dominant: str | None = None
    weight: float | None = None


def is_loss(model: nn.Module, path: str) -> bool:
    """Whether a module is called or named a loss.

    Args:
        model: The model.
        path: Of the module.
    """
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    name = path.rpartition('.')[2]
    return type(module).__name__.endswith('Loss') or name.startswith('loss')


def weight_of(model: nn.Module, path: str | None) -> float | None:
    """``loss_weight`` of the module at a path, or None."""
    weight = getattr(model.get_submodule(path), 'loss_weight', None) if (
        path) else None
    return float(weight) if isinstance(weight, (int, float)) else None


def config_place(model: nn.Module, path: str,
                 config: Mapping[str, Any] | None = None) -> Place | None:
    """Where below ``model`` of a config a module is, or None.

    A list is replaced as a whole by a config: what is in one has no place
    of its own. Of the others the place is the argument that the parent was
    built with, which is not always called as the attribute is.

    Args:
        model: The model.
        path: Of the module.
        config: Of the model, where it is known.

    Returns:
        The place, and what must be written there besides a change: a
        default, where the config says nothing.
    """
    place, parent = [], model
    default: Any = {}
    for part in path.split('.'):
        if part in ('student', 'teacher') and parent is model:
            # Both are the detector of the config.
            name, default = 'detector', {}
        else:
            argument = _argument(type(parent), part)
            if argument is None:
                return None
            name, default = argument.name, argument.default
        place.append(name)
        parent = parent.get_submodule(part)
        if config is not None:
            config = config.get(name, _NOTHING)
            if not isinstance(config, Mapping):
                return None
    if config is None or config is not _NOTHING:
        return '.'.join(place), {}
    # Else a change alone would say no type.
    return ('.'.join(place), default) if isinstance(
        default, dict) and 'type' in default else None


#: Stands for a key that a config does not have, and for what is below it.
_NOTHING: Mapping[str, Any] = {}


def _argument(kind: type, attribute: str) -> inspect.Parameter | None:
    """The argument of a class that an attribute is made from, or None."""
    known: dict[str, inspect.Parameter] = {}
    for base in reversed(kind.__mro__):
        if '__init__' in vars(base) and base is not object:
            known.update(inspect.signature(base).parameters)
    if attribute in known:
        return known[attribute]
    losses = [name for name, argument in known.items()
              if name.startswith('loss_')
              and isinstance(argument.default, dict)]
    return known[losses[0]] if attribute == 'criterion' and (
        len(losses) == 1) else None


def optim_wrapper(**settings: Any) -> dict[str, Any]:
    """Return changes of the ``optim_wrapper`` of a config."""
    return {'optim_wrapper': settings}


def to_hook(changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes with settings where the hook has them, whose win."""
    wrapper = dict(changes.get('optim_wrapper', {}))
    settings = wrapper.pop('nanfix', None)
    if settings is None:
        return changes
    changes = {**changes, 'optim_wrapper': wrapper, 'default_hooks': {
        'nanfix': {'type': 'NanGuardHook', **settings}}}
    return {key: value for key, value in changes.items() if value}


def as_config(changes: Mapping[str, Any]) -> str:
    """Return Python for a config file: one assignment a top-level key."""
    return '\n'.join(f'{key} = {_code(value)}'
                     for key, value in changes.items())


def _code(value: Any) -> str:
    if isinstance(value, dict) and all(key.isidentifier() for key in value):
        inside = ', '.join(f'{key}={_code(item)}'
                           for key, item in value.items())
        return f'dict({inside})'
    return repr(value)


def model_patch(place: Place | None, **changes: Any) -> dict[str, Any]:
    """Return changes of one module of a model.

    Args:
        place: Of :func:`config_place`; None for no changes.
        **changes: Of its config.
    """
    if place is None:
        return {}
    path, besides = place
    value = {**besides, **changes}
    for name in reversed(path.split('.')):
        value = {name: value}
    return {'model': value}


def rounded_down(value: float) -> float:
    """Return a number, down to a power of ten times 1, 2 or 5."""
    if value <= 0 or not math.isfinite(value):
        return value
    power = 10. ** math.floor(math.log10(value))
    digit = next(step for step in (5, 2, 1) if step * power <= value)
    return float(f'{digit * power:.6g}')
