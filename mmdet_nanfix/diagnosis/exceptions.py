"""Explain by replays why a forward raised.

An exception is put down to non-finite numbers when it comes again in a
second forward of the same batch and does not come in a third, in which what
operations compute is made finite. It is put down to annotations when it does
not come with something fine in the place of those that are bad. Nothing is
guessed from its text.
"""
from __future__ import annotations

import copy
import dataclasses
import math
import traceback
from typing import Any, Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..guard import CaughtException
from ..guard.state import Rng
from ..torch_support import tree_leaves
from .replay.annotations import BadAnnotation, bad_annotations, repaired
from .replay.call_site import CallSites, is_library
from .replay.op_record import CallSite

__all__ = ['ExceptionDetails', 'NanToNumMode', 'explain', 'num_classes_of']

Forward = Callable[..., Any]


class NanToNumMode(TorchDispatchMode):
    """Makes what operations compute finite, but for what was asked for.

    NaN becomes 0 and an infinity the largest number of the dtype, where an
    operation makes it of finite inputs, or finds it in a batch, a weight or
    a buffer. Infinities that a caller puts in (a ``-inf`` in
    ``masked_fill``, ``full``) stay, and so does what follows from them. For
    replays: each operation reads from the device.
    """

    def __init__(self) -> None:
        super().__init__()
        # Tensors that hold infinities on purpose; held, so that no other
        # tensor gets their memory.
        self._meant: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any,
                           args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        alias = [argument.alias_info for argument in func._schema.arguments]
        if not any(alias):
            args, kwargs = tree_map(self._read, (args, kwargs))
        asked = any(self._is_asked(value) for value in tree_leaves(
            (args, kwargs)))
        out = func(*args, **kwargs)
        if any(info is not None and info.is_write for info in alias):
            tree_map(lambda value: self._written(value, asked), out)
            return out
        return tree_map(lambda value: self._made(value, asked), out)

    def _is_asked(self, value: Any) -> bool:
        """Whether an argument is an infinity, or holds some on purpose."""
        if isinstance(value, float):
            return math.isinf(value)
        return isinstance(value, Tensor) and _memory(value) in self._meant

    def _read(self, value: Any) -> Any:
        if not _is_floating(value) or _memory(value) in self._meant:
            return value
        return torch.nan_to_num(value)

    def _made(self, value: Any, asked: bool) -> Any:
        if not _is_floating(value):
            return value
        if asked and value.isinf().any():
            self._meant[_memory(value)] = value
            return torch.nan_to_num_(value, posinf=math.inf, neginf=-math.inf
                                     ) if value.isnan().any() else value
        return value if torch.isfinite(value).all() else (
            torch.nan_to_num(value))

    def _written(self, value: Any, asked: bool) -> Any:
        if _is_floating(value) and (
                torch._debug_has_internal_overlap(value) != 1):
            if asked:
                self._meant[_memory(value)] = value
            else:
                value.nan_to_num_()
        return value


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if (
        tensor.layout == torch.strided) else id(tensor)


def _is_floating(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.is_floating_point()
            and value.layout == torch.strided)


@dataclasses.dataclass
class ExceptionDetails:
    """What is known of an exception that is put down to a batch.

    Attributes:
        op: The function of a library that was called there, or None.
        site: Where it was called from.
        bad: The annotations it was put down to; empty where it was
            non-finite numbers.
    """

    op: str | None = None
    site: CallSite = dataclasses.field(default_factory=CallSite)
    bad: list[BadAnnotation] = dataclasses.field(default_factory=list)


def explain(error: Exception, model: nn.Module, forward: Forward,
            args: tuple[Any, ...], kwargs: Mapping[str, Any], rng: Rng,
            reset: Callable[[], None]) -> CaughtException | None:
    """Explain by replays why a forward raised.

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
    try:
        return _by_trial(error, model, forward, args, kwargs, rng, reset)
    except Exception:
        # A batch that cannot be copied, a sample of an unknown kind: then
        # nothing was found out, and the user's own exception is what counts.
        return None


def _by_trial(error: Exception, model: nn.Module, forward: Forward,
              args: tuple[Any, ...], kwargs: Mapping[str, Any], rng: Rng,
              reset: Callable[[], None]) -> CaughtException | None:
    samples = kwargs.get('data_samples')
    bad = list(bad_annotations(samples, num_classes_of(model)))
    # The forward may have changed its arguments; a trial must not.
    again = copy.deepcopy((args, dict(kwargs)))

    def raises(samples: Any = None, kind: type = Exception) -> bool:
        called, named = copy.deepcopy(again)
        if samples is not None:
            named['data_samples'] = samples
        reset()
        rng.restore()
        try:
            forward(*called, **named)
        except Exception as other:
            return isinstance(other, kind)
        return False

    if not raises(kind=type(error)):
        return None
    fine = repaired(samples, bad) if samples is not None and bad else None
    if fine is not None and not raises(fine):
        return _describe(error, model, bad)
    with NanToNumMode():
        if not raises():
            return _describe(error, model, [])
        # A bad annotation and a number that is not finite in one batch.
        if fine is not None and not raises(fine):
            return _describe(error, model, bad)
    return None


def num_classes_of(model: nn.Module) -> int | None:
    """The largest number of classes of any head, or None."""
    return max((module.num_classes for module in model.modules()
                if isinstance(getattr(module, 'num_classes', None), int)),
               default=None)


def _describe(error: Exception, model: nn.Module,
              bad: list[BadAnnotation]) -> CaughtException:
    called = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        called = (called or frame.f_code.co_name) if is_library(frame) else (
            None)
    text = ' '.join(str(error).split())
    kind = type(error).__name__
    return CaughtException(kind, f'{kind}: {text}'[:500], ExceptionDetails(
        called, CallSites(model).of_error(error), bad))
