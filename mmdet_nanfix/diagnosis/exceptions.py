"""Explain by replays why a forward raised.

An exception is put down to non-finite numbers when it comes again in a
second forward of the same batch and does not come in a third, in which the
probe sets what is not finite to 0. It is put down to annotations when it does
not come with something fine in the place of those that are bad. Nothing is
guessed from its text.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import traceback
from typing import Any, Callable, ContextManager, Mapping

from torch import nn

from ..guard import CaughtException
from ..guard.state import BatchSnapshot, Rng
from .replay.annotations import BadAnnotation, bad_annotations, repaired
from .replay.call_site import CallSites, is_library
from .replay.op_record import CallSite, is_floating

__all__ = ['ExceptionDetails', 'explain', 'num_classes_of']

Forward = Callable[..., Any]


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
            reset: Callable[[], None],
            mending: Callable[[], ContextManager[Any]]
            ) -> CaughtException | None:
    """Explain by replays why a forward raised.

    Args:
        error: What it raised.
        model: The model.
        forward: Its forward.
        args: What it was called with.
        kwargs: Likewise.
        rng: State of the generators when it was called.
        reset: Takes the model back to where it was before.
        mending: Makes a region in which the non-finite results of operations
            are set to 0.

    Returns:
        None where the exception has another cause, or cannot be had again.
    """
    # The forward may have changed its arguments; a replay must not.
    again = copy.deepcopy((args, dict(kwargs)))
    samples: Any = kwargs.get('data_samples')
    bad = list(bad_annotations(samples, num_classes_of(model)))

    def raises(mended: bool = False, samples: Any = None,
               kind: type = Exception) -> bool:
        called, named = copy.deepcopy(again)
        if samples is not None:
            named['data_samples'] = samples
        reset()
        rng.restore()
        try:
            with mending() if mended else contextlib.nullcontext():
                for tensor in BatchSnapshot(
                        (called, named)).tensors if mended else ():
                    if is_floating(tensor):
                        tensor.nan_to_num_()
                forward(*called, **named)
        except Exception as other:
            return isinstance(other, kind)
        return False

    if not raises(kind=type(error)):
        return None
    fine = repaired(samples, bad) if bad else None
    if fine is not None and not raises(samples=fine):
        return _describe(error, model, bad)
    if not raises(True):
        return _describe(error, model, [])
    # A bad annotation and a number that is not finite in one batch.
    if fine is not None and not raises(True, fine):
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
