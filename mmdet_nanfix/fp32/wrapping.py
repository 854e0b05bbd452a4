"""Wrap methods and functions so that they run in full precision.

A wrapped one is the original until :func:`switched` says otherwise.
"""
from __future__ import annotations

import contextlib
import functools
import threading
import types
from typing import Any, Callable, Iterator, Optional

import torch
from torch import nn

from ..torch_support import (
    AUTOCAST_BY_DEVICE,
    HALVES,
    Patches,
    map_tensors,
    not_compiled,
    tensors,
)
from .cast import WideSigmoid, widened, without_autocast
from .introspect import own_codes

__all__ = [
    'MARK', 'MODES', 'SWITCH', 'enter', 'exact', 'fp32_inputs', 'fp32_loss',
    'hold_regions', 'in_region', 'is_inside', 'rounded', 'switched',
    'wide_sigmoid', 'wrap', 'wrap_function'
]

#: Attribute of what is a region already.
MARK = 'fp32_region_of_mmdet_nanfix'
#: Values of the setting ``fp32``.
MODES = ('heads', 'losses', None)

Method = Callable[..., Any]
#: Gives for a method the one to use in its place in fp32, or None.
Mend = Callable[[Method], Optional[Method]]


class _Switch:
    """Keep what is in force in this process.

    Attributes:
        mode: One of :data:`MODES`.
        device: Type of the device whose autocast is meant.
        parts: ``id`` of each module that runs in fp32 as a whole.
    """

    mode: str | None = None
    device = 'cpu'
    parts: frozenset[int] = frozenset()


class _Place(threading.local):
    """Keep where this thread is.

    Attributes:
        inside: Whether a region has begun: nothing is cast twice.
        wide: Whether sigmoids are looked at.
    """

    inside = False
    wide = False


_PLACE = _Place()
# As long as there is a model whose precision is controlled.
_PATCHES = Patches('fp32 regions')
#: Of methods that compute a sigmoid in fp32.
_CODES: set[types.CodeType] = set()
#: In force now.
SWITCH = _Switch()


@contextlib.contextmanager
def switched(mode: str | None, device: str,
             parts: frozenset[int] = frozenset()) -> Iterator[None]:
    """Let the regions run in fp32.

    A global, not a context variable: checkpointed forwards run again in
    threads of autograd, and must find what they found before.

    Args:
        mode: ``'heads'`` for all, ``'losses'`` for the loss modules alone,
            None for none.
        device: Type of the device whose autocast is left.
        parts: ``id`` of each module that runs in fp32 as a whole.
    """
    before = SWITCH.mode, SWITCH.device, SWITCH.parts
    SWITCH.mode, SWITCH.device, SWITCH.parts = mode, device, parts
    try:
        yield
    finally:
        SWITCH.mode, SWITCH.device, SWITCH.parts = before


def hold_regions(owner: Any) -> None:
    """Keep what is wrapped until this and every other owner is gone."""
    _PATCHES.hold(owner)


def is_inside() -> bool:
    """Tell if this thread is in a region: nothing is cast again."""
    return _PLACE.inside


@not_compiled
def enter(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function in a region: fp32 inputs, autocast off.

    Args:
        function: What to call.
        args: Its arguments.
        kwargs: Likewise.
    """
    _PLACE.inside = True
    try:
        with without_autocast(SWITCH.device):
            args, kwargs = widened((args, kwargs))
            return function(*args, **kwargs)
    finally:
        _PLACE.inside = False


def in_region(original: Method) -> Method:
    """Run a method in fp32 in mode ``heads``; the result stays fp32."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if SWITCH.mode != 'heads' or _PLACE.inside:
            return original(self, *args, **kwargs)
        return enter(functools.partial(original, self), args, kwargs)

    return call


def fp32_loss(original: Method, mend: Mend) -> Method:
    """Run a loss in fp32 in either mode, by a formula that is finite."""
    mended = mend(original) or original

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if SWITCH.mode is None:
            return original(self, *args, **kwargs)
        if _PLACE.inside:
            return mended(self, *args, **kwargs)
        return enter(functools.partial(mended, self), args, kwargs)

    return forward


def exact(original: Method, mend: Mend) -> Method:
    """Use another formula in a region, where there is one."""
    mended = mend(original)
    if mended is None:
        return original
    better = mended

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (better if _PLACE.inside else original)(*args, **kwargs)

    return call


def fp32_inputs(original: Method) -> Method:
    """Cast inputs to fp32, and keep autocast for what is called."""

    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        if SWITCH.mode != 'heads' or _PLACE.inside:
            return original(self, *args, **kwargs)
        args, kwargs = widened((args, kwargs))
        return original(self, *args, **kwargs)

    return sample


def rounded(original: Method) -> Method:
    """Run in fp32 and round the result to half: what follows is a layer."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if SWITCH.mode != 'heads' or _PLACE.inside or (
                _layers_besides(self)):
            return original(self, *args, **kwargs)
        # The features' first.
        half = next((tensor.dtype for tensor in tensors((args, kwargs))
                     if tensor.dtype in HALVES), None)
        if half is None:
            return original(self, *args, **kwargs)
        out = enter(functools.partial(original, self), args, kwargs)
        return map_tensors(lambda tensor: tensor.to(half) if (
            tensor.dtype == torch.float32) else tensor, out)

    return forward


def _layers_besides(extractor: nn.Module) -> bool:
    """Tell if an extractor has layers of its own: they stay half."""
    return any(name != 'roi_layers' for name in extractor._modules)


def wide_sigmoid(original: Method) -> Method:
    """Compute each sigmoid in a method's own code in fp32."""
    _CODES.update(own_codes(original))

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if SWITCH.mode != 'heads' or _PLACE.inside or _PLACE.wide:
            return original(self, *args, **kwargs)
        return _enter_wide(functools.partial(original, self), args, kwargs)

    return call


@not_compiled
def _enter_wide(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _PLACE.wide = True
    try:
        with WideSigmoid(_CODES):
            return function(*args, **kwargs)
    finally:
        _PLACE.wide = False


def _is_region(function: Any, mark: str = MARK) -> bool:
    """Tell if a function, or one that it wraps, is so marked."""
    while function is not None:
        # ``functools.wraps`` copies the mark of another function.
        if getattr(function, '__dict__', {}).get(mark) is function:
            return True
        function = getattr(function, '__wrapped__', None)
    return False


def _marked(function: Method, mark: str = MARK) -> Method:
    setattr(function, mark, function)
    return function


def _passing_on(function: Method) -> Method:
    """Wrap a function without its attributes.

    By them older dynamos would find the function of a bound method, and lose
    what it is bound to.
    """

    @functools.wraps(function, updated=())
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return call


def wrap(kind: type, name: str, make: Callable[[Method], Method],
          mark: str = MARK) -> None:
    """Wrap a method in the class that defines it, once.

    Args:
        kind: The class, or one below it.
        name: Of the method.
        make: Gives what to put in its place.
        mark: Attribute of what was put so.
    """
    for base in kind.__mro__:
        if name in base.__dict__:
            break
    else:
        return
    original = base.__dict__[name]
    if base is nn.Module or not isinstance(original, types.FunctionType) or (
            _is_region(original, mark)):
        return

    def made(below: Method) -> Method:
        wrapped = make(below)
        if wrapped is below:
            return below
        if not AUTOCAST_BY_DEVICE:
            # Older dynamos raise at super() in a method that is wrapped.
            wrapped = _passing_on(not_compiled(wrapped))
        return _marked(wrapped, mark)

    _PATCHES.wrap(base, name, made)


def wrap_function(module: Any, name: str) -> None:
    """Wrap a function where a module's code finds it."""
    original = vars(module).get(name) if module is not None else None
    if not callable(original) or _is_region(
            getattr(original, '__func__', original)):
        return

    def made(function: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if SWITCH.mode != 'heads' or _PLACE.inside:
                return function(*args, **kwargs)
            return enter(function, args, kwargs)

        return _marked(wrapped)

    _PATCHES.wrap(module, name, made)
