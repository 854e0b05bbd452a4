"""Train a model by a few batches."""
from __future__ import annotations

import copy

import torch
from mmengine.optim import build_optim_wrapper

SGD = dict(type='SGD', lr=.1)


def wrap(model, type='NanSafeAmpOptimWrapper', optimizer=SGD, **kwargs):
    return build_optim_wrapper(
        model, dict(type=type, optimizer=dict(optimizer), **kwargs))


def train(model, wrapper, *batches):
    return [model.train_step(copy.deepcopy(batch), wrapper)
            for batch in batches]


def weights(model):
    return {name: value.clone() for name, value in
            model.named_parameters()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)
