"""Where in a config the modules of a model are."""
from __future__ import annotations

import inspect
from typing import Any, Mapping

from torch import nn

__all__ = ['config_place', 'is_loss', 'weight_of']


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
                  config: Mapping[str, Any] | None = None
                  ) -> tuple[str, Mapping[str, Any]] | None:
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
