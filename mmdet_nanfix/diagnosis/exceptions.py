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
from ..torch_support import walk
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
    caught = _describe(error, model)
    _let_go(error)
    # The forward may have changed its arguments; a replay must not.
    again = copy.deepcopy((args, dict(kwargs)))
    samples: Any = kwargs.get('data_samples')
    bad = list(bad_annotations(samples, num_classes_of(model)))

    def replay(mended: bool = False, samples: Any = None
               ) -> Exception | None:
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
            return other
        return None

    if not isinstance(replay(), type(error)):
        return None
    fine = repaired(samples, bad) if bad else None
    if fine is not None and replay(samples=fine) is None:
        caught.details.bad = bad
    elif replay(True) is None:
        pass
    # A bad annotation and a number that is not finite in one batch.
    elif fine is not None and replay(True, fine) is None:
        caught.details.bad = bad
    else:
        # The user's own exception: with frames that a debugger can look into.
        restored = replay()
        if restored is not None and restored.__traceback__ is not None:
            error.__traceback__ = restored.__traceback__.tb_next
        return None
    return caught


def _let_go(error: BaseException) -> None:
    """Clear frames, which hold the activations of the forward that failed."""
    for one in walk([error], lambda other: [
            chained for chained in (other.__cause__, other.__context__)
            if chained is not None]):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            # Not those that still run.
            with contextlib.suppress(RuntimeError):
                frame.clear()
                # Up to Python 3.12 a copy of what was asked for is kept, until
                # it is asked for again.
                len(frame.f_locals)


def num_classes_of(model: nn.Module) -> int | None:
    """The largest number of classes of any head, or None."""
    return max((module.num_classes for module in model.modules()
                if isinstance(getattr(module, 'num_classes', None), int)),
               default=None)


def _describe(error: Exception, model: nn.Module) -> CaughtException:
    called = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        called = (called or frame.f_code.co_name) if is_library(frame) else (
            None)
    return CaughtException.of(error, ExceptionDetails(
        called, CallSites(model).of_error(error)))
