"""Guarded steps without a host."""
from __future__ import annotations

import functools

import torch

from mmdet_nanfix.diagnosis import diagnostician
from mmdet_nanfix.guard import GuardedStep, PlainTrainer
from mmdet_nanfix.guard.rules import LossScale, LossScaleSettings, StopRule


class FakeRanks:
    """The ranks of a run in several processes, in one.

    Args:
        which: Takes a flag, returns the ranks on which it is up.
        share: Takes a value and a rank, returns that of the rank.
    """

    alone = False
    rank = 0

    def __init__(self, which, share=lambda value, source: value):
        self.which = which
        self.share = share

    def barrier(self):
        pass


class ClockedTrainer(PlainTrainer):
    """In epoch 1, at iteration 5."""

    def clock(self):
        return 1, 5


def guard_of(model, ranks=None, max_incidents=100, sharded=False,
             diagnose=None, **stop):
    return GuardedStep(
        model, torch.optim.SGD(model.parameters(), .1),
        LossScale(LossScaleSettings()), StopRule(**stop),
        ClockedTrainer(model, ranks), diagnose or functools.partial(
            diagnostician, max_incidents=max_incidents), sharded=sharded)


def parts_of(model, trainer=None, ranks=None, optimizer=None):
    """What the diagnosis of a guarded step is given."""
    taken = []
    GuardedStep(
        model, optimizer or torch.optim.SGD(model.parameters(), .1),
        LossScale(LossScaleSettings(enabled=False)), StopRule(),
        trainer or PlainTrainer(model, ranks), taken.append)
    return taken[0]


def run(guard, *batches):
    """One optimizer step; returns the verdict."""
    guard.model.zero_grad()
    for batch in batches:
        with guard.capture():
            losses = guard.model(**batch)
        total, _ = guard.model.parse_losses(losses)
        (guard.attach(total) * guard.scale.scale).backward()
    found_inf = not all(torch.isfinite(parameter.grad).all()
                        for parameter in guard.model.parameters())
    return guard.judge(found_inf)


class Running(torch.nn.Module):
    """A buffer that a forward may poison while the loss stays finite."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 1)
        self.register_buffer('mean', torch.zeros(2))
        self.register_buffer('mask', torch.zeros(2, 2))

    def forward(self, x, fill=None):
        self.mean = self.mean * .9 + x.mean(0).detach() * .1
        if fill is not None:
            self.mask.copy_(fill)
        return {'loss': self.head(x.nan_to_num(0., 0., 0.)).mean()}


def go(guard, **batch):
    guard.model.zero_grad()
    with guard.capture():
        losses = guard.model(**batch)
    guard.attach(losses['loss']).backward()
    found = not all(torch.isfinite(parameter.grad).all()
                    for parameter in guard.model.parameters()
                    if parameter.grad is not None)
    return guard.judge(found)
