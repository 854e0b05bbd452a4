"""Sanitize inputs of functions that raise for non-finite numbers.

In runs of several ranks one that raises in the middle of a forward leaves
the others waiting in the heads' own collectives. Within :func:`sanitizing`
these functions take what
they would refuse as something finite, and report it, so that every rank
reaches the end of the step and all skip it together:

* ``scipy.optimize.linear_sum_assignment``, in whatever module uses it:
  Hungarian matching;
* ``torch.nn.functional.binary_cross_entropy``: inputs outside of 0 to 1;
* ``torch.nn.functional.one_hot``: labels out of range.
"""
from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...torch_support import Patches

__all__ = ['install_sanitizers', 'sanitizing']

Report = Callable[[Tensor], None]
# Of the process: a checkpointed forward is computed again in a thread of
# autograd's own. The innermost region comes last.
_REPORTS: list[Report] = []
_MARK = 'of_mmdet_nanfix'
_PATCHES = Patches('sanitizers')


@contextlib.contextmanager
def sanitizing(report: Report | None = None) -> Iterator[None]:
    """Region in which nothing below raises for what is not finite.

    Args:
        report: Called with a scalar that is NaN where something was mended;
            no device sync. By whatever thread. None: nobody is told.
    """
    told = report or _nobody
    _REPORTS.append(told)
    try:
        yield
    finally:
        _REPORTS.remove(told)


def _nobody(flag: Tensor) -> None:
    """Tell nobody."""


def _report() -> Report | None:
    return _REPORTS[-1] if _REPORTS else None


def _matching(original: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(original)
    def linear_sum_assignment(cost_matrix: Any,
                              maximize: bool = False) -> Any:
        report = _report()
        try:
            return original(cost_matrix, maximize)
        except ValueError:
            if report is None:
                raise
        report(torch.tensor(float('nan')))
        return original(np.nan_to_num(np.asarray(cost_matrix, dtype=float),
                                      posinf=1e8, neginf=-1e8), maximize)

    return linear_sum_assignment


def _entropy(original: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(original)
    def binary_cross_entropy(input: Tensor, target: Tensor,  # noqa: A002
                             *args: Any, **kwargs: Any) -> Any:
        report = _report()
        if report is not None:
            inside = ((input >= 0) & (input <= 1)).all()
            report(_nan_unless(inside))
            input = torch.nan_to_num(input).clamp(0., 1.)
        return original(input, target, *args, **kwargs)

    return binary_cross_entropy


def _one_hot(original: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(original)
    def one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
        report = _report()
        if report is not None and num_classes > 0:
            inside = ((tensor >= 0) & (tensor < num_classes)).all()
            report(_nan_unless(inside))
            tensor = tensor.clamp(0, num_classes - 1)
        return original(tensor, num_classes)

    return one_hot


def _nan_unless(fine: Tensor) -> Tensor:
    return torch.where(fine, 0., float('nan'))


def _wrap(module: Any, name: str,
          make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    if not getattr(getattr(module, name), _MARK, False):
        _PATCHES.wrap(module, name, lambda original: _marked(make(original)))


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _MARK, True)
    return function


def install_sanitizers(owner: Any) -> None:
    """Wrap the functions, once; outside of the region nothing changes.

    Args:
        owner: They are put back when this and every other one is gone.
    """
    _PATCHES.hold(owner)
    _wrap(functional, 'binary_cross_entropy', _entropy)
    _wrap(functional, 'one_hot', _one_hot)
    try:
        from scipy.optimize import linear_sum_assignment as original
    except ImportError:
        return
    for name, module in list(sys.modules.items()):
        # None blocks an import, and there may be any other object.
        if getattr(module, '__dict__', {}).get(
                'linear_sum_assignment') is original and (
                    name.partition('.')[0] != 'scipy'):
            _wrap(module, 'linear_sum_assignment', _matching)
