"""Find the methods of a model, and objects below it, that compute losses.

By what they are called and by the names that their code uses, as far as it
can be told without running anything.
"""
from __future__ import annotations

import dis
import inspect
import types
from typing import Any, Container, Iterator

from torch import Tensor, nn

from ..torch_support import walk

__all__ = [
    'loss_modules', 'names_in', 'own_codes', 'plain_objects',
    'reaches_a_network', 'runs_layers', 'takes_predictions'
]

_SAMPLES = ('batch_data_samples', 'data_samples')
# What no method of interest can hang below.
_MACHINERY = ('builtins', 'torch', 'numpy', 'logging', 'threading',
              'collections', 'mmengine', 'mmdet_nanfix')
_TOO_LONG = 1000
_OF_ANY_MODULE = frozenset(dir(nn.Module))


def _written(kind: type, name: str) -> Any:
    """Return a method as it was written, or None; nothing is run."""
    method = inspect.getattr_static(kind, name, None)
    return inspect.unwrap(method) if isinstance(
        method, types.FunctionType) else None


_COMPREHENSIONS = ('<listcomp>', '<setcomp>', '<dictcomp>', '<genexpr>')


def own_codes(function: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the comprehensions in it."""
    return _codes(function, _COMPREHENSIONS)


def _codes(function: Any,
           inner: Container[str]) -> Iterator[types.CodeType]:
    code = getattr(function, '__code__', None)
    return walk([] if code is None else [code], lambda code: [
        const for const in code.co_consts
        if isinstance(const, types.CodeType) and const.co_name in inner])


def names_in(kind: type, name: str) -> set[str]:
    """Return the names that the code of a method uses."""
    return {used for code in own_codes(_written(kind, name))
            for used in code.co_names}


def takes_predictions(module: nn.Module) -> bool:
    """Tell if ``loss`` is a loss, and not a forward that ends in one.

    A ``loss`` that gets data samples, that has a ``loss_by_feat`` beside it,
    or that runs layers is one: layers stay half.
    """
    kind = type(module)
    code = getattr(_written(kind, 'loss'), '__code__', None)
    return code is not None and not hasattr(kind, 'loss_by_feat') and not any(
        name in _SAMPLES for name in code.co_varnames) and (
            not runs_layers(module, 'loss'))


def runs_layers(module: nn.Module, name: str) -> bool:
    """Tell if a method, or one that it calls, uses parts with weights."""
    kind = type(module)
    layers = {child for child, part in module.named_children()
              if _has_weights(part)}
    seen, waiting = {name}, [name]
    while waiting:
        method = waiting.pop()
        names = names_in(kind, method)
        if 'forward' in names or layers & names or (
                _hands_itself_on(_written(kind, method))):
            return True
        # ``x.float()`` is a tensor's, whatever a module has of that name.
        found = {called for called in names - seen - _OF_ANY_MODULE
                 if _written(kind, called) is not None}
        seen |= found
        waiting.extend(found)
    return False


def _hands_itself_on(method: Any) -> bool:
    """Tell if a method calls its ``self``, or gives it to others."""
    code = getattr(method, '__code__', None)
    if code is None or not code.co_argcount:
        return False
    own = code.co_varnames[0]
    for inner in _codes(method, (*_COMPREHENSIONS, '<lambda>')):
        steps = list(dis.get_instructions(inner))
        for step, follower in zip(steps, steps[1:]):
            if not step.opname.startswith(('LOAD_FAST', 'LOAD_DEREF')):
                continue
            # From Python 3.13 on one instruction may load two.
            names = step.argval if isinstance(step.argval, tuple) else (
                step.argval, )
            if own in names[:-1] or names[-1] == own and not (
                    follower.opname.endswith(('_ATTR', '_METHOD'))):
                return True
    return False


def _has_weights(module: nn.Module) -> bool:
    # Of shards the parameters are elsewhere; torch's layers can make new.
    return next(module.parameters(), None) is not None or any(
        hasattr(part, 'reset_parameters') for part in module.modules())


def loss_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield loss modules: by their name, or by what a parent calls them.

    What is called so may be a network as well (a perceptual loss, a model
    with its loss): with weights below it counts as none.
    """
    for name, module in model.named_modules():
        if module is model or type(module).__module__.startswith(
                'torch.nn') or any(map(_has_weights, module.children())):
            continue
        if type(module).__name__.endswith('Loss') or not _has_weights(
                module) and any(_means_a_loss(model, name)):
            yield module


def _means_a_loss(model: nn.Module, name: str) -> Iterator[bool]:
    """Tell it of the name itself, and of the containers around it."""
    parts = name.split('.')
    for count in range(len(parts), 0, -1):
        if not parts[count - 1].isdigit():
            yield parts[count - 1].startswith(('loss', 'criterion'))
        parent = model.get_submodule('.'.join(parts[:count - 1]))
        if not isinstance(parent, (nn.ModuleList, nn.ModuleDict)):
            return


_HOOKS_AND_PARTS = frozenset(nn.Module().__dict__)


def _held(thing: Any) -> list[Any]:
    """Return what hangs right below a container or an object."""
    if isinstance(thing, dict):
        return list(dict.values(thing))
    if isinstance(thing, (list, tuple, set)):
        return list(thing)
    return [value for name, value in list(getattr(
        thing, '__dict__', {}).items()) if not (
            isinstance(thing, nn.Module) and name in _HOOKS_AND_PARTS)]


_CONTAINERS = (dict, list, tuple, set)


def _is_plain(value: Any) -> bool:
    """Tell if it is an object whose methods may be somebody's."""
    return hasattr(value, '__dict__') and not isinstance(value, (
        *_CONTAINERS, Tensor, nn.Module, type, types.FunctionType,
        types.ModuleType)) and (
            str(type(value).__module__).partition('.')[0] not in _MACHINERY)


def plain_objects(model: nn.Module) -> Iterator[tuple[Any, bool]]:
    """Yield objects that modules hold, and whether below an assigner."""
    assigned: set[int] = set()

    def below(value: Any) -> list[Any]:
        if not _is_plain(value) and not (
                isinstance(value, _CONTAINERS) and len(value) <= _TOO_LONG):
            return []
        held = _held(value)
        if id(value) in assigned or hasattr(type(value), 'assign'):
            assigned.update(map(id, held))
        return held

    for value in walk([value for module in model.modules()
                       for value in _held(module)], below):
        if _is_plain(value):
            yield value, id(value) in assigned


def reaches_a_network(thing: Any) -> bool:
    """Tell if a module hangs below: it may compute what the object does."""

    def below(value: Any) -> list[Any]:
        if isinstance(value, types.MethodType):
            return [value.__self__]
        return _held(value) if isinstance(value, _CONTAINERS) or (
            _is_plain(value)) else []

    return any(isinstance(value, nn.Module)
               for value in walk(_held(thing), below))
