"""Runs of a Runner whose whole state is compared."""
from __future__ import annotations

import collections
import copy
import random

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

ADAM = dict(type='AdamW', lr=.01)


class Book(Hook):
    """Writes down the whole state after each iteration."""

    priority = 'LOWEST'

    def __init__(self):
        self.pages = []

    def after_train_iter(self, runner, batch_idx, data_batch=None,
                         outputs=None):
        page = {f'model.{k}': v for k, v in runner.model.state_dict().items()}
        for hook in runner.hooks:
            if hasattr(hook, 'ema_model'):
                page.update({f'ema.{k}': v for k, v in
                             hook.ema_model.state_dict().items()})
        state = runner.optim_wrapper.optimizer.state_dict()['state']
        # Before torch 2.2 SGD without momentum keeps a None.
        page.update({f'optimizer.{i}.{k}': v for i, entry in state.items()
                     for k, v in entry.items() if v is not None})
        page['rng'] = torch.get_rng_state()
        self.pages.append(self.keep(page))

    keep = staticmethod(copy.deepcopy)


def differing(left, right):
    assert left.keys() == right.keys()
    return [key for key in left
            if not torch.equal(torch.as_tensor(left[key]),
                               torch.as_tensor(right[key]))]


def make(model, tmp_path, dataset, *, hooks=(), name='run', batches=8,
         wrapper='AmpOptimWrapper', scope='mmdet', checkpoints=4,
         optimizer=ADAM, cfg=None, **settings):
    return Runner(
        model, str(tmp_path), experiment_name='-'.join(
            [*tmp_path.parts[-2:], name]),
        train_dataloader=dict(
            dataset=dataset, batch_size=1, num_workers=0,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=lambda items: items[0]),
        train_cfg=dict(by_epoch=False, max_iters=batches),
        optim_wrapper=dict(type=wrapper, optimizer=dict(optimizer),
                           **settings),
        param_scheduler=dict(type='LinearLR', start_factor=.5, by_epoch=False,
                             begin=0, end=100),
        default_scope=scope, custom_hooks=list(hooks), cfg=cfg,
        randomness=dict(seed=5),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=1),
            checkpoint=dict(type='CheckpointHook', interval=checkpoints,
                            by_epoch=False, save_last=False)))


class NoStep:
    """The reference: what the skipped iterations do is nothing."""

    def __init__(self, *skipped, backoff=False):
        self.skipped, self.backoff = skipped, backoff

    def __call__(self, runner):
        model, steps = runner.model, iter(range(1000))
        train_step = model.train_step

        def step(data, optim_wrapper):
            if next(steps) not in self.skipped:
                return train_step(data, optim_wrapper)
            wrapper = runner.optim_wrapper
            if self.backoff:
                wrapper.scale_rules.update(
                    losses_finite=True, grads_finite=False)
                wrapper.set_scale(wrapper.scale_rules.scale)
            return {}

        model.train_step = step
        for hook in runner.hooks:
            if hasattr(hook, 'ema_model') or type(hook).__name__ == 'EMAHook':
                update = hook.after_train_iter
                hook.after_train_iter = (
                    lambda runner, batch_idx, *args, update=update, **kw:
                    None if batch_idx in self.skipped
                    else update(runner, batch_idx, *args, **kw))



class Sampler:
    """A plain object, as assigners and samplers are."""

    def __init__(self):
        self.threshold = .5
        self.seen = []
        self.rng = random.Random(0)
        self.dice = np.random.default_rng(0)


class Unknown(nn.Module):
    """State of every kind, changed in every way, in one forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer('kept', torch.zeros(3))
        self.register_buffer('count', torch.zeros((), dtype=torch.long))
        self.register_buffer('replaced', torch.ones(2))
        self.register_buffer('grown', torch.ones(2))
        self.register_buffer('absent', None)
        self.counter = 0
        self.history = [1., [2.]]
        self.table = collections.OrderedDict(a=[1])
        self.recent = collections.deque([1, 2], maxlen=2)
        self.labels = {1}
        self.array = np.zeros(2)
        self.plain = torch.zeros(2)
        self.sampler = Sampler()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self):
        self.kept += 1
        self.count += 1
        self.replaced = self.replaced * 2
        self.grown.resize_(4).fill_(7.)
        self.absent = torch.ones(1)
        self.register_buffer('late', torch.ones(1))
        self.child = nn.BatchNorm1d(2)
        self.counter += 1
        self.fresh = 'new'
        self.history[1].append(3.)
        self.history.append(4.)
        self.table['a'].append(2)
        self.table['b'] = 1
        self.recent.append(3)
        self.labels.add(2)
        self.array += 1
        self.plain.add_(1)
        self.sampler.threshold = .9
        self.sampler.seen.append(1)
        return (self.sampler.rng.random(), self.sampler.dice.random(),
                random.random(), np.random.rand(), torch.rand(1).item())
