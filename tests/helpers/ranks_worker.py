"""One of two gloo processes; started by ``test_ranks.py``.

``python ranks_worker.py RANK STORE OUT`` writes what it saw in each case to
``OUT/seen.RANK`` as JSON.
"""
from __future__ import annotations

import copy
import datetime
import json
import math
import os
import re
import sys
import time

import torch
import torch.distributed as torch_dist
from mmengine.logging import MMLogger
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import build_optim_wrapper
from stock import stock_on_cpu

import mmdet_nanfix
from helpers.toy import ToyDetector, make_hot, toy_batch
from mmdet_nanfix.hosts.mmengine import reporter
from mmdet_nanfix.incidents import read_log
from mmdet_nanfix.torch_support.features import HAS_CPU_SCALER

WORLD = 2
COLLECTIVES = ('all_reduce', 'all_gather', 'broadcast', 'barrier',
               'all_gather_object', 'broadcast_object_list', 'gather')


class Collectives:
    """Counts what Python code asks of the process group."""

    def __init__(self):
        self.calls = []
        for name in COLLECTIVES:
            self._count(name)

    def _count(self, name):
        original = getattr(torch_dist, name)

        def counted(*args, **kwargs):
            self.calls.append(name)
            return original(*args, **kwargs)

        setattr(torch_dist, name, counted)


class Partly(ToyDetector):
    """A branch that only some batches use."""

    def forward(self, inputs, data_samples=None, mode='loss'):
        losses = super().forward(inputs, data_samples, mode)
        if inputs.get('skip'):
            losses.pop('loss_second')
        return losses


def build(find_unused=False, kind='NanSafeAmpOptimWrapper', model=None,
          **settings):
    torch.manual_seed(0)
    model = MMDistributedDataParallel(
        model or Partly(), device_ids=None, broadcast_buffers=False,
        find_unused_parameters=find_unused)
    wrapper = build_optim_wrapper(model, dict(
        type=kind, optimizer=dict(type='AdamW', lr=.01), **settings))
    return model, wrapper


def everywhere(model):
    """Whether the weights are equal on all ranks."""
    own = torch.cat([value.flatten() for value in model.parameters()])
    seen = [torch.empty_like(own) for _ in range(WORLD)]
    torch_dist.all_gather(seen, own.detach())
    return torch.equal(*seen)


def step(model, wrapper, batch):
    batch = copy.deepcopy(batch)
    # Ranks have batches of their own.
    batch['inputs']['x'] = batch['inputs']['x'] + torch_dist.get_rank()
    model.train_step(batch, wrapper)


def said(wrapper):
    return wrapper.stop_rule.state_dict(), wrapper.scale_rules.scale


def one_rank(rank, accumulate, at, find_unused, who, fault, **settings):
    """A fault on one rank; then two good windows."""
    model, wrapper = build(find_unused, accumulative_counts=accumulate,
                           **settings)
    wrapper.initialize_count_status(model, 0, 3 * accumulate)
    before = copy.deepcopy(model.state_dict())
    seen = []
    for index in range(3 * accumulate):
        bad = index == at and rank == who
        step(model, wrapper, toy_batch(**(fault if bad else {})))
        seen.append(everywhere(model))
        if index == accumulate - 1:
            kept = model.state_dict()
            untouched = all(torch.equal(before[name], kept[name])
                            for name in before)
    return {'equal': all(seen), 'untouched': untouched,
            'moved': any(not torch.equal(before[name], value) for name, value
                         in model.state_dict().items()),
            'said': said(wrapper), 'finite': all(
                bool(torch.isfinite(value).all())
                for value in model.state_dict().values())}


def case_ddp(rank, out):
    seen = {}
    for find_unused in (False, True):
        for who in (0, 1):
            for at in (0, 1, 2):
                for name, fault in (('loss', dict(rpn=math.nan)),
                                    ('input', dict(x=math.inf)),
                                    ('gradient', dict(box=1e37))):
                    seen[f'{find_unused} {who} {at} {name}'] = one_rank(
                        rank, 3, at, find_unused, who, fault)
    return seen


def case_plain(rank, out):
    return {str(who): one_rank(
        rank, 1, 0, False, who, dict(rpn=math.nan),
        kind='NanSafeOptimWrapper') for who in (0, 1)}


def case_collectives(rank, out):
    """What a healthy step asks for, beside stock's."""
    counts = {}
    counter = Collectives()
    for kind in ('AmpOptimWrapper', 'NanSafeAmpOptimWrapper'):
        with stock_on_cpu():
            model, wrapper = build(
                kind=kind, loss_scale=dict(init_scale=64.))
            step(model, wrapper, toy_batch())
            counter.calls.clear()
            step(model, wrapper, toy_batch())
        counts[kind] = len(counter.calls)
    step(model, wrapper, toy_batch(rpn=math.nan if rank else 1.))
    counts['failed'] = len(counter.calls) - counts['NanSafeAmpOptimWrapper']
    return counts


def case_named(rank, out):
    """The log names the rank where it began."""
    os.makedirs(os.path.join(out, f'{rank}'))
    logger = MMLogger.get_instance('named', log_file=os.path.join(
        out, f'{rank}', 'run.log'), distributed=True)
    assert logger
    model, wrapper = build()
    for bad in (False, True):
        step(model, wrapper, toy_batch(
            rpn=math.nan if rank == 1 and bad else 1.))
    name = 'incidents.jsonl' if rank == 0 else 'incidents_rank1.jsonl'
    (record, ) = read_log(os.path.join(out, f'{rank}', 'nanfix', name))
    return {'ranks': record['ranks'], 'rank': record['rank'],
            'heads': record['heads']['rpn_head']['bad_losses'],
            'op': record['where']['op'], 'replay': record['replay']}


def case_retry(rank, out):
    """A loss scale that is too high, for the batch of one rank or of both."""
    seen = {}
    for accumulate in (1, 2):
        for who in (0, 1, None):
            model, wrapper = build(accumulative_counts=accumulate,
                                   loss_scale=dict(init_scale=64.))
            wrapper.initialize_count_status(model, 0, 9 * accumulate)
            incidents = []
            wrapper.reporter.report = incidents.append
            for index in range(3 * accumulate):
                if index == accumulate:
                    wrapper.scale_rules.scale = 2.**30
                    wrapper.set_scale(2.**30)
                before = copy.deepcopy(model.state_dict())
                # One rank has losses a hundred times as large.
                step(model, wrapper, toy_batch(
                    box=1. if who in (None, rank) else .01))
            seen[f'{accumulate} {who}'] = {
                'actions': [incident.action for incident in incidents],
                'scale': wrapper.scale_rules.scale,
                'equal': everywhere(model), 'said': said(wrapper)[0],
                'moved': any(not torch.equal(before[name], value)
                             for name, value in model.state_dict().items())}
    return seen


def case_hot(rank, out):
    """A head that leaves half's range, for the batch of one rank."""
    seen = {}
    for who in (0, 1, None):
        model, wrapper = build(True, loss_scale=dict(init_scale=64.))
        for group in wrapper.optimizer.param_groups:
            group['lr'] = 1e-12
        wrapper.initialize_count_status(model, 0, 9)
        incidents = []
        wrapper.reporter.report = incidents.append
        wrapper.guard.history.accept(1e9)
        step(model, wrapper, toy_batch())
        make_hot(model.module.roi_head.bbox_head)
        before = copy.deepcopy(model.state_dict())
        for _ in range(4):
            batch = toy_batch()
            batch['inputs']['skip'] = who not in (None, rank)
            step(model, wrapper, batch)
        seen[str(who)] = {
            'actions': [incident.action for incident in incidents],
            'codes': [incident.cause.code if incident.cause else None
                      for incident in incidents],
            'ranks': [incident.ranks for incident in incidents],
            'sticky': list(wrapper.promotions.names),
            'equal': everywhere(model), 'said': said(wrapper),
            'moved': any(not torch.equal(before[name], value)
                         for name, value in model.state_dict().items())}
    return seen


class Labelled(ToyDetector):
    """A label becomes a one-hot vector, sanitised on several ranks."""

    def forward(self, inputs, data_samples=None, mode='loss'):
        losses = super().forward(inputs, data_samples, mode)
        label = torch.tensor([inputs.get('label', 0)])
        weight = torch.nn.functional.one_hot(label, 4).sum().float()
        return {**losses, 'loss_first': losses['loss_first'] * weight}


def case_tainted(rank, out):
    """A label out of range and an overflow in one step."""
    seen = {}
    for scale in (64., 2.**30):
        model, wrapper = build(model=Labelled(),
                               loss_scale=dict(init_scale=64.))
        wrapper.initialize_count_status(model, 0, 9)
        incidents = []
        wrapper.reporter.report = incidents.append
        step(model, wrapper, toy_batch())
        wrapper.scale_rules.scale = scale
        wrapper.set_scale(scale)
        before = copy.deepcopy(model.state_dict())
        batch = toy_batch()
        batch['inputs']['label'] = 7 if rank else 0
        step(model, wrapper, batch)
        after = model.state_dict()
        seen[str(scale)] = {
            'actions': [incident.action for incident in incidents],
            'kept': all(torch.equal(before[name], after[name])
                        for name in before),
            'scale': wrapper.scale_rules.scale}
    return seen


def case_stop(rank, out):
    """All ranks stop together, once the weights are there."""
    save = reporter.save_checkpoint

    def slowly(*args, **kwargs):
        time.sleep(1)
        save(*args, **kwargs)

    reporter.save_checkpoint = slowly
    model, wrapper = build(nanfix=dict(max_consecutive=2))
    wrapper.reporter.folder = os.path.join(out, 'stop')
    try:
        for _ in range(3):
            step(model, wrapper, toy_batch(rpn=math.nan if rank else 1.))
    except mmdet_nanfix.NonFiniteError as error:
        path = re.search(r'are in (\S+\.pth)', str(error)).group(1)
        return {'stopped': wrapper.stop_rule.steps,
                'ranks': error.incident.ranks,
                'saved': sorted(torch.load(path, weights_only=True)),
                'beside': sorted(name for name in os.listdir(
                    os.path.dirname(path)) if 'pth' in name)}
    finally:
        reporter.save_checkpoint = save
    return {}


def case_resume(rank, out):
    """A checkpoint right after an incident, and on from there."""
    model, wrapper = build()
    batches = [toy_batch(), toy_batch(box=1e37 if rank else 1.),
               toy_batch(), toy_batch()]
    for batch in batches[:2]:
        step(model, wrapper, batch)
    weights, state = copy.deepcopy(
        (model.state_dict(), wrapper.state_dict()))
    for batch in batches[2:]:
        step(model, wrapper, batch)
    again, resumed = build()
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    for batch in batches[2:]:
        step(again, resumed, batch)
    return {'same': all(torch.equal(left, right) for left, right in zip(
        model.state_dict().values(), again.state_dict().values())),
        'equal': everywhere(again), 'said': said(wrapper) == said(resumed),
        'scale': resumed.scale_rules.scale}


def case_fsdp(rank, out):
    """Shards: the same decision on all ranks, one number more a step."""
    from mmengine.model import MMFullyShardedDataParallel
    if not HAS_CPU_SCALER:
        return None
    seen = {}
    for who in (0, 1):
        for name, fault in (('loss', dict(rpn=math.nan)),
                            ('gradient', dict(box=1e37))):
            for kind in ('NanSafeAmpOptimWrapper', 'NanSafeOptimWrapper'):
                if kind == 'NanSafeOptimWrapper' and name == 'gradient':
                    continue
                torch.manual_seed(0)
                model = MMFullyShardedDataParallel(
                    ToyDetector(), device_id=torch.device('cpu'),
                    use_orig_params=False)
                wrapper = build_optim_wrapper(model, dict(
                    type=kind, optimizer=dict(type='AdamW', lr=.01),
                    **(dict(use_fsdp=True) if 'Amp' in kind else {})))
                flat = [value.detach().clone()
                        for value in model.parameters()]
                kept = []
                for bad in (True, False):
                    step(model, wrapper, toy_batch(
                        **(fault if rank == who and bad else {})))
                    kept.append(all(torch.equal(*pair) for pair in zip(
                        flat, model.parameters())))
                seen[f'{who} {name} {kind}'] = [kept, said(wrapper)]
    return seen


class Matched(ToyDetector):
    """Raises for a prediction that is not finite, as DETR does."""

    def forward(self, inputs, data_samples=None, mode='loss'):
        from mmdet.models.task_modules.assigners import hungarian_assigner
        losses = super().forward(inputs, data_samples, mode)
        cost = torch.stack([losses['loss_first'].detach()] * 4).view(2, 2)
        rows, _ = hungarian_assigner.linear_sum_assignment(cost.numpy())
        # A collective in the head, after the matching.
        total = torch.tensor(float(len(rows)))
        torch_dist.all_reduce(total)
        return {**losses, 'loss_first': losses['loss_first'] * total / 4}


def case_matching(rank, out):
    """A matcher that would raise on one rank lets all ranks go on."""
    torch.manual_seed(0)
    model, wrapper = build(model=Matched())
    before = copy.deepcopy(model.state_dict())
    step(model, wrapper, toy_batch(rpn=math.nan if rank else 1.))
    after = model.state_dict()
    kept = all(torch.equal(before[name], after[name]) for name in before)
    step(model, wrapper, toy_batch())
    return {'kept': kept, 'equal': everywhere(model), 'said': said(wrapper)}


def main():
    rank, store, out = sys.argv[1:]
    torch.set_num_threads(1)
    torch_dist.init_process_group(
        'gloo', init_method=f'file://{store}', rank=int(rank),
        world_size=WORLD, timeout=datetime.timedelta(seconds=40))
    seen = {name[len('case_'):]: case(int(rank), out)
            for name, case in sorted(globals().items())
            if name.startswith('case_')}
    with open(os.path.join(out, f'seen.{rank}'), 'w') as file:
        json.dump(seen, file)
    torch_dist.barrier()
    torch_dist.destroy_process_group()


if __name__ == '__main__':
    main()
