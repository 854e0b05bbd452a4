"""A detector of two heads that trains in milliseconds."""
from __future__ import annotations

import torch
from mmengine.model import BaseModel
from torch import nn


class Branch(nn.Module):
    """A head: one hidden layer, one output, a loss of its own."""

    def __init__(self, width=4):
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def loss(self, x, key, factor):
        return {key: self.out(self.hidden(x).relu()).float().mean() * factor}


class RoIHead(nn.Module):

    def __init__(self):
        super().__init__()
        self.bbox_head = Branch()


class ToyDetector(BaseModel):
    """Two heads over one backbone, as a two-stage detector has them."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.rpn_head = Branch()
        self.roi_head = RoIHead()

    def forward(self, inputs, data_samples=None, mode='loss'):
        x = self.backbone(inputs['x'])
        return {
            **self.rpn_head.loss(x, 'loss_first', inputs['rpn']),
            **self.roi_head.bbox_head.loss(x, 'loss_second', inputs['box']),
            'accuracy': torch.tensor(float('nan')),
        }


def toy_batch(rpn=1., box=1., x=1.):
    """Loss factors: nan spoils a loss, 1e30 overflows the gradients."""
    torch.manual_seed(1)
    return {'inputs': {'x': torch.randn(8, 4) * x, 'rpn': rpn, 'box': box}}



def make_hot(head, factor=2.**20):
    """A head whose hidden layer leaves half's range, and nothing else."""
    with torch.no_grad():
        head.hidden.bias.add_(1.)
        head.hidden.weight.mul_(factor)
        head.hidden.bias.mul_(factor)
        head.out.weight.div_(factor)
