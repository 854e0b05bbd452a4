from __future__ import annotations

import pytest
import torch
from helpers.guards import FakeRanks, parts_of
from torch import nn

from mmdet_nanfix.diagnosis.context import RunContext
from mmdet_nanfix.guard import PlainTrainer, RunConfig


@pytest.mark.parametrize('filled, fits', [
    (1 / 600., 512.), (1 / 511., 256.), (1 / 3., 2.), (1 / 1.5, 1.),
    (0., 512.), (5., 1.)])
def test_the_highest_scale_that_fits_half(filled, fits):
    """What fills a share of the range at scale 1, at 1024 too much."""
    assert RunContext(scale=1024.).fitting(filled) == fits


def test_no_scale_is_below_the_lowest():
    context = RunContext(scale=48., lowest=16., backoff=.25)
    assert context.fitting(.5) == context.fitting(2.) == 16.
    assert RunContext(scale=1.).fitting(2.) == 1.


def test_it_is_read_off_a_step():
    model = nn.Linear(2, 1)
    trainer = PlainTrainer(model)
    trainer.config = RunConfig(clips_anew=True, by_hook=True, fp32='heads')
    optimizer = torch.optim.Adam(
        [{'params': [model.weight], 'eps': 1e-4}, {'params': [model.bias]}],
        lr=.5)
    parts = parts_of(model, trainer, optimizer=optimizer)
    context = RunContext.of(parts, False, True, lambda name: None)
    assert (context.half, context.fp32, context.eps, context.rate) == (
        False, 'heads', 1e-8, .5)
    assert context.clips_anew and context.by_hook and context.can_retry
    assert context.scale == context.lowest == 1. and context.alone
    assert context.place('rpn_head') is None and context.norm is None
    assert context.sane(1.) is None and context.usual_loss('loss') is None
    for norm in (1., 2., 3.):
        parts.history.accept(norm)
    context = RunContext.of(parts, False, False, lambda name: None)
    assert context.sane(31.) is False and context.norm == 2.


@pytest.mark.parametrize('together', [False, True])
def test_with_others_more_precision_takes_all_of_them(together):
    parts = parts_of(nn.Linear(2, 1), ranks=FakeRanks(lambda flag: []))
    context = RunContext.of(parts, together, False, lambda name: None)
    assert not context.alone and context.can_widen is together
    assert RunContext().can_widen
