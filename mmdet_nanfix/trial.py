"""Trials that tell why a forward raised.

An exception is put down to non-finite numbers when it comes again in a
second forward of the same batch and does not come in a third, in which every
operation's result is made finite. It is put down to annotations when it does
not come without those that are bad. Nothing is guessed from its text.
"""
import copy
import dataclasses
import os
import traceback
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .annotations import BadAnnotation, bad_annotations, without
from .transaction import Rng

__all__ = ['FiniteOnly', 'Raised', 'why']

Forward = Callable[..., Any]
# Frames of these packages raise on behalf of their caller.
_LIBRARIES = tuple(
    f'{os.sep}site-packages{os.sep}{name}{os.sep}'
    for name in ('torch', 'numpy', 'scipy')) + (
        f'{os.sep}mmdet_nanfix{os.sep}', )


class FiniteOnly(TorchDispatchMode):
    """Makes what every operation reads and writes finite.

    NaN becomes 0 and an infinity the largest number of the dtype. For
    replays: each operation costs up to twice as much.
    """

    def __torch_dispatch__(self, func: Any, types: Any,
                           args: Tuple[Any, ...] = (),
                           kwargs: Optional[Dict[str, Any]] = None) -> Any:
        writes = any(argument.alias_info is not None
                     and argument.alias_info.is_write
                     for argument in func._schema.arguments)
        views = any(argument.alias_info is not None
                    for argument in func._schema.arguments)
        if not views:
            args, kwargs = tree_map(_finite, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if writes:
            tree_map(_make_finite, out)
            return out
        return out if views else tree_map(_finite, out)


def _is_floating(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.is_floating_point()
            and value.layout == torch.strided)


def _finite(value: Any) -> Any:
    return torch.nan_to_num(value) if _is_floating(value) else value


def _make_finite(value: Any) -> Any:
    if _is_floating(value) and torch._debug_has_internal_overlap(value) != 1:
        value.nan_to_num_()
    return value


@dataclasses.dataclass
class Raised:
    """An exception in a forward and what the trials put it down to.

    Attributes:
        error: Its type and text, on one line.
        source: ``file:line`` of the innermost frame in the user's or the
            host's code.
        op: The function that raised.
        module: Path of the innermost module whose method was running.
        bad: The annotations it was put down to; empty where it was
            non-finite numbers.
    """

    error: str
    source: Optional[str]
    op: Optional[str]
    module: Optional[str]
    bad: List[BadAnnotation]


def why(error: Exception, model: nn.Module, forward: Forward,
        args: Tuple[Any, ...], kwargs: Mapping[str, Any], rng: Rng,
        reset: Callable[[], None]) -> Optional[Raised]:
    """Find out by trial why a forward raised.

    Args:
        error: What it raised.
        model: The model.
        forward: Its forward.
        args: What it was called with.
        kwargs: Likewise.
        rng: State of the generators when it was called.
        reset: Takes the model back to where it was before.

    Returns:
        None where the exception has another cause, or cannot be had again.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return None

    def raises(samples: Any = None) -> bool:
        reset()
        rng.restore()
        # The forward may have changed its arguments; a trial must not.
        called = dict(copy.deepcopy(dict(kwargs)))
        if samples is not None:
            called['data_samples'] = samples
        try:
            forward(*copy.deepcopy(args), **called)
        except Exception as again:
            return type(again) is type(error)
        return False

    if not raises():
        return None
    samples = kwargs.get('data_samples')
    bad = list(bad_annotations(samples, num_classes_of(model)))
    if samples is None or not bad or raises(without(samples, bad)):
        bad = []
        with FiniteOnly():
            if raises():
                return None
    return _describe(error, model, bad)


def num_classes_of(model: nn.Module) -> Optional[int]:
    """The largest number of classes of any head, or None."""
    return max((module.num_classes for module in model.modules()
                if isinstance(getattr(module, 'num_classes', None), int)),
               default=None)


def _describe(error: Exception, model: nn.Module,
              bad: List[BadAnnotation]) -> Raised:
    names = {id(module): name for name, module in model.named_modules()}
    module = source = op = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        op = frame.f_code.co_name
        path = frame.f_code.co_filename
        if not any(part in path for part in _LIBRARIES):
            source = f'{path}:{line}'
        owner = names.get(id(frame.f_locals.get('self')))
        module = owner or module
    text = ' '.join(str(error).split())
    return Raised(f'{type(error).__name__}: {text}'[:500], source, op,
                  module, bad)
