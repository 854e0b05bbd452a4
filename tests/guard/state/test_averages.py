from __future__ import annotations

import copy

import torch
from helpers.runs import Sampler
from torch import nn

from mmdet_nanfix.guard.state import AveragedModels


def test_averages():
    """Tensors, and counts beside those that moved; records go on."""
    model = nn.Linear(1, 1)
    shadow, counter = Sampler(), Sampler()
    shadow.average = {'w': torch.zeros(1)}
    shadow.models = [nn.Linear(1, 1)]
    shadow.source, shadow.steps, counter.steps = model, 3, 3
    shadow.last = torch.zeros(1)
    counter.record = [torch.zeros(1)]
    averages = AveragedModels([shadow, counter], besides=[model])
    averages.copy([model.bias])
    before = copy.deepcopy(shadow.models[0].state_dict())
    with torch.no_grad():
        shadow.average['w'] += 1
        shadow.models[0].weight.fill_(7.)
        model.weight.fill_(7.)
        model.bias.fill_(7.)
    shadow.steps = counter.steps = 4
    shadow.last = torch.ones(1)
    counter.record.append(torch.ones(1))
    averages.restore()
    assert shadow.last.item() == 0 and len(counter.record) == 2
    assert shadow.average['w'].item() == 0
    assert torch.equal(shadow.models[0].weight, before['weight'])
    assert (shadow.steps, counter.steps) == (3, 4)
    assert model.weight.item() == 7 and model.bias.item() != 7
