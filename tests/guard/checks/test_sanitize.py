from __future__ import annotations

import math
import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from mmdet.models.task_modules.assigners import hungarian_assigner
from scipy.optimize import linear_sum_assignment

from mmdet_nanfix.guard.checks import sanitize


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Wrapped for the test alone."""
    users = [(module, 'linear_sum_assignment')
             for module in list(sys.modules.values())
             if 'linear_sum_assignment' in getattr(module, '__dict__', {})]
    for place, name in ((F, 'binary_cross_entropy'), (F, 'one_hot'), *users):
        monkeypatch.setattr(place, name, getattr(place, name))
    sanitize.install_sanitizers(sanitize)
    sanitize.install_sanitizers(sanitize)


COST = torch.tensor([[1., 2.], [3., 4.]])


@pytest.mark.parametrize('bad, good, call', [
    (COST * math.nan, COST,
     lambda cost: hungarian_assigner.linear_sum_assignment(cost)),
    (COST * -math.inf, COST,
     lambda cost: hungarian_assigner.linear_sum_assignment(cost)),
    (torch.tensor([math.nan, .5]), torch.tensor([1., .5]),
     lambda x: F.binary_cross_entropy(x, torch.tensor([1., 0.]))),
    (torch.tensor([1.5, .5]), torch.tensor([1., .5]),
     lambda x: F.binary_cross_entropy(x, torch.tensor([1., 0.]))),
    (torch.tensor([-1, 0]), torch.tensor([2, 0]),
     lambda labels: F.one_hot(labels, 3)),
    (torch.tensor([3, 0]), torch.tensor([2, 0]),
     lambda labels: F.one_hot(labels, 3)),
])
def test_what_would_raise_is_reported(bad, good, call):
    with pytest.raises((ValueError, RuntimeError)):
        call(bad)
    wanted = call(good)
    told = []
    with sanitize.sanitizing(told.append):
        call(bad)
        assert torch.stack(told).isnan().any()
        told.clear()
        out = call(good)
        assert not any(flag.isnan() for flag in told)
    for left, right in zip(wanted, out) if isinstance(wanted, tuple) else (
            [(wanted, out)]):
        assert (torch.as_tensor(left) == torch.as_tensor(right)).all()
    with pytest.raises((ValueError, RuntimeError)):
        call(bad)


def test_an_infeasible_matrix_of_infinities():
    told = []
    with sanitize.sanitizing(told.append):
        rows, _ = hungarian_assigner.linear_sum_assignment(
            torch.full((2, 2), math.inf))
    assert len(rows) == 2 and told


def test_any_module_that_uses_the_matching_is_found(monkeypatch):
    own = types.ModuleType('own_matcher')
    own.linear_sum_assignment = linear_sum_assignment
    monkeypatch.setitem(sys.modules, 'own_matcher', own)
    sanitize.install_sanitizers(sanitize)
    with sanitize.sanitizing(lambda flag: None):
        own.linear_sum_assignment(COST * math.nan)
    assert linear_sum_assignment.__module__.startswith('scipy')


class Strange:
    """Somebody's object in the place of a module."""

    __slots__ = ()


def test_what_is_no_module_blocks_nothing(monkeypatch):
    """None is the documented way to block an import."""
    monkeypatch.setitem(sys.modules, 'cupy', None)
    monkeypatch.setitem(sys.modules, 'lazy', Strange())
    sanitize.install_sanitizers(sanitize)


def test_a_forward_that_another_thread_computes_again_is_sanitized():
    """Autograd has threads of its own, on a GPU for every backward."""
    told, raised = [], []

    def again():
        try:
            F.one_hot(torch.tensor([7]), 3)
        except Exception as error:
            raised.append(error)

    with sanitize.sanitizing(told.append), (
            sanitize.sanitizing(told.append)):
        thread = threading.Thread(target=again)
        thread.start()
        thread.join()
    assert not raised and len(told) == 1 and told[0].isnan()
    again()
    assert len(raised) == 1
