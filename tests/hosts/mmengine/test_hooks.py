from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.logs import said_in
from helpers.runs import Book, NoStep, differing, make
from helpers.torch_features import needs_fused
from helpers.toy import ToyDetector, make_hot, toy_batch
from mmengine.hooks import Hook, RuntimeInfoHook
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS
from stock import stock_on_cpu
from torch.utils.data import Dataset

import mmdet_nanfix
from mmdet_nanfix.hosts.mmengine.amp_optim_wrapper import (
    NanSafeAmpOptimWrapper,
)
from mmdet_nanfix.hosts.mmengine.convert import guard_existing_wrapper
from mmdet_nanfix.hosts.mmengine.full_optim_wrapper import NanSafeOptimWrapper
from mmdet_nanfix.hosts.mmengine.hooks import NanGuardHook
from mmdet_nanfix.incidents import read_log


class Batches(Dataset):
    """One batch an index; a dict of factors tells what is wrong with it."""

    def __init__(self, *bad, length=8):
        self.bad, self.length = dict(bad), length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return toy_batch(**self.bad.get(index, {}))


EMA = dict(type='EMAHook', ema_type='ExponentialMovingAverage',
           momentum=.1, update_buffers=True)


def run(tmp_path, dataset, **kwargs):
    torch.manual_seed(0)
    book = Book()
    runner = make(ToyDetector(), tmp_path, dataset,
                  hooks=[book, *kwargs.pop('hooks', [])], **kwargs)
    runner.train()
    return runner, book.pages


@pytest.mark.parametrize('wrapper', [
    'AmpOptimWrapper', 'NanSafeOptimWrapper'])
@pytest.mark.parametrize('fault', [
    dict(rpn=math.nan), dict(box=math.inf), dict(x=math.nan),
    dict(box=1e37)])
def test_a_skipped_step_leaves_nothing_behind(tmp_path, wrapper, fault):
    overflow = fault == dict(box=1e37)
    if overflow and wrapper == 'NanSafeOptimWrapper':
        fault = dict(box=1e39)
    (tmp_path / 'a').mkdir(), (tmp_path / 'b').mkdir()
    settings = dict(wrapper=wrapper, hooks=[dict(EMA)],
                    clip_grad=dict(max_norm=1.))
    _, ours = run(tmp_path / 'a', Batches((3, fault)), **copy.deepcopy(
        settings))
    torch.manual_seed(0)
    book = Book()
    settings['hooks'] = [book, *settings['hooks']]
    reference = make(ToyDetector(), tmp_path / 'b', Batches(), **settings)
    NoStep(3, backoff=overflow and 'Amp' in wrapper)(reference)
    reference.train()
    assert len(ours) == len(book.pages) == 8
    for left, right in zip(ours, book.pages):
        assert differing(left, right) == []
    assert differing(ours[1], ours[2])
    assert differing(ours[2], ours[3]) == []


@pytest.mark.parametrize('bad_at', [2, 3])
def test_accumulation(tmp_path, bad_at):
    """A window of two: averaged models go back to where it began."""
    (tmp_path / 'a').mkdir(), (tmp_path / 'b').mkdir()
    settings = dict(accumulative_counts=2)
    _, ours = run(tmp_path / 'a', Batches((bad_at, dict(x=math.inf))),
                  hooks=[dict(EMA)], **settings)
    torch.manual_seed(0)
    book = Book()
    reference = make(ToyDetector(), tmp_path / 'b', Batches(),
                     hooks=[book, dict(EMA)], **settings)
    NoStep(2, 3)(reference)

    # The iterations count all the same.
    def count(model=reference.model, step=reference.model.train_step):
        def counted(data, optim_wrapper):
            out = step(data, optim_wrapper)
            if out == {}:
                optim_wrapper._inner_count += 1
            return out
        model.train_step = counted

    count()
    reference.train()
    for index in (0, 1, 3, 4, 5, 6, 7):
        assert differing(ours[index], book.pages[index]) == [], index


def test_printed_losses_and_the_check_of_mmdet(tmp_path):
    """One skipped step does not make a window of lines NaN, nor abort."""
    from mmdet.engine.hooks import CheckInvalidLossHook
    seen = []

    class Look(Hook):

        def after_train_iter(self, runner, batch_idx, data_batch=None,
                             outputs=None):
            seen.append(float(outputs['loss']))

    dataset = Batches((0, dict(rpn=math.nan)), (3, dict(rpn=math.nan)))
    runner, _ = run(tmp_path, dataset, hooks=[
        CheckInvalidLossHook(interval=1), Look()])
    assert len(seen) == 8 and all(map(math.isfinite, seen))
    assert seen[0] == 0 and seen[3] == seen[2]
    history = runner.message_hub.get_scalar('train/loss').data[0]
    assert len(history) == 6 and all(map(math.isfinite, history))
    (log, ) = tmp_path.glob('*/*.log')
    lines = [line for line in log.read_text().splitlines()
             if '(train) ' in line]
    assert len(lines) == 8
    # A metric that is NaN by itself is the model's own business.
    assert 'loss: nan' not in log.read_text()


def test_full_precision_by_a_hook_alone(tmp_path):
    runner, pages = run(
        tmp_path, Batches((2, dict(rpn=math.nan)), (5, dict(box=math.inf))),
        wrapper='OptimWrapper',
        hooks=[dict(type='NanGuardHook', max_consecutive=7)])
    assert type(runner.optim_wrapper) is NanSafeOptimWrapper
    (path, ) = tmp_path.glob('*/nanfix/incidents.jsonl')
    assert [record['iter'] for record in read_log(path)] == [3, 6]
    assert all(torch.isfinite(value).all() for name, value in
               pages[-1].items() if name.startswith('model'))
    lines = said_in(tmp_path)
    assert 'full-precision' in lines[0] and 'after 7' in lines[0]
    assert '2 of 8 optimizer steps' in lines[-1]
    # Schedulers count the steps of the wrapper that they were given.
    assert runner.optim_wrapper._global_step >= 7


def test_a_healthy_full_precision_run_equals_stock(tmp_path):
    (tmp_path / 'a').mkdir(), (tmp_path / 'b').mkdir()
    _, ours = run(tmp_path / 'a', Batches(), wrapper='OptimWrapper',
                  hooks=[dict(type='NanGuardHook')])
    _, stock = run(tmp_path / 'b', Batches(), wrapper='OptimWrapper')
    for left, right in zip(ours, stock):
        assert differing(left, right) == []


def test_a_fully_qualified_type_needs_no_import():
    assert HOOKS.build(dict(type='mmdet_nanfix.NanGuardHook'))


def test_settings_of_the_hook_win(tmp_path):
    runner, _ = run(tmp_path, Batches(), batches=1, loss_scale=32.,
                    nanfix=dict(init_scale=64., max_consecutive=3),
                    hooks=[dict(type='NanGuardHook', init_scale=128.)])
    assert runner.optim_wrapper.scale_rules.scale == 128
    assert runner.optim_wrapper.stop_rule.max_consecutive == 3
    assert runner.optim_wrapper.loss_scaler.get_scale() == 128


@pytest.mark.parametrize('settings, error', [
    (dict(max_consecutive=0), ValueError), (dict(scale=1.), TypeError)])
def test_impossible_settings(settings, error, toy):
    with pytest.raises(error):
        wrapper = OptimWrapper(torch.optim.SGD(toy.parameters(), .1))
        NanGuardHook(**settings)
        guard_existing_wrapper(wrapper, settings)


def test_stock_amp_in_another_scope_is_adopted(tmp_path):
    with stock_on_cpu():
        torch.manual_seed(0)
        runner = make(ToyDetector(), tmp_path,
                      Batches((2, dict(rpn=math.nan))),
                      wrapper='AmpOptimWrapper', loss_scale=512.,
                      hooks=[dict(type='NanGuardHook')], scope='mmengine')
        runner.train()
    assert type(runner.optim_wrapper) is NanSafeAmpOptimWrapper
    assert runner.optim_wrapper.scale_rules.scale == 256
    assert runner.optim_wrapper.stop_rule.total == 1


def test_the_hook_adds_itself_once(tmp_path):
    for name, hooks in (('none', []), ('own', [dict(type='NanGuardHook')])):
        folder = tmp_path / name
        folder.mkdir()
        book = Book()
        runner = make(ToyDetector(), folder, Batches(), batches=1,
                      hooks=[book, *hooks])
        runner.train()
        kinds = [type(hook).__name__ for hook in runner.hooks]
        assert kinds.count('NanGuardHook') == 1
        assert kinds.count('_RestoreHook') == 2
        assert kinds.count('NanfixRuntimeInfoHook') == 1


@pytest.mark.parametrize('place', ['weight', 'buffer', 'optimizer', 'ema'])
def test_a_checkpoint_that_is_not_finite_is_announced(tmp_path, place):
    class Spoil(Hook):
        priority = 80

        def after_train_iter(self, runner, batch_idx, data_batch=None,
                             outputs=None):
            if batch_idx != 3:
                return
            state = runner.optim_wrapper.optimizer.state
            ema = next(hook.ema_model for hook in runner.hooks
                       if hasattr(hook, 'ema_model'))
            tensor = {
                'weight': runner.model.rpn_head.out.bias,
                'buffer': runner.model.backbone[1].running_var,
                'optimizer': next(iter(state.values()))['exp_avg_sq'],
                'ema': ema.module.rpn_head.out.bias,
            }[place]
            tensor.data.fill_(math.inf)

    run(tmp_path, Batches(), batches=4, hooks=[Spoil(), dict(EMA)])
    told = [line for line in said_in(tmp_path) if 'the checkpoint of' in line]
    assert len(told) == 1 and 'iter 4 holds 1 tensors' in told[0]


def test_resume(tmp_path):
    """MMEngine 0.10.7 cannot read its own checkpoints on a new torch."""
    (tmp_path / 'a').mkdir(), (tmp_path / 'b').mkdir()
    bad = (2, dict(box=1e37)), (5, dict(rpn=math.nan))
    whole, pages = run(tmp_path / 'a', Batches(*bad), batches=7,
                       hooks=[dict(EMA)])
    first, _ = run(tmp_path / 'b', Batches(*bad), batches=4,
                   hooks=[dict(EMA)])
    torch.manual_seed(0)
    book = Book()
    second = make(ToyDetector(), tmp_path / 'b', Batches(*bad), batches=7,
                  name='again', hooks=[book, dict(EMA)])
    second._resume, second._load_from = True, str(
        tmp_path / 'b' / 'iter_4.pth')
    second.train()
    assert second.optim_wrapper.scale_rules.scale == 128
    counts = [runner.optim_wrapper.state_dict()['loss_scaler']
              for runner in (whole, second)]
    assert counts[0] == counts[1]
    assert counts[0]['nanfix_total'] == 2 and counts[0]['nanfix_steps'] == 7
    assert [key for key in differing(pages[-1], book.pages[-1])
            if key != 'rng'] == []


def test_stop(tmp_path):
    bad = [(index, dict(rpn=math.nan)) for index in range(2, 8)]
    with pytest.raises(mmdet_nanfix.NonFiniteError) as caught:
        run(tmp_path, Batches(*bad), nanfix=dict(max_consecutive=3))
    assert caught.value.incident.iter == 5


def test_a_mean_teacher_in_the_model(tmp_path):
    class Student(ToyDetector):

        def __init__(self):
            super().__init__()
            self.teacher = torch.nn.Linear(4, 1).requires_grad_(False)

    class Average(Hook):

        def after_train_iter(self, runner, batch_idx, data_batch=None,
                             outputs=None):
            weight = runner.model.rpn_head.out.weight
            runner.model.teacher.weight.data.lerp_(weight.data, .5)

    torch.manual_seed(0)
    book = Book()
    make(Student(), tmp_path, Batches((3, dict(rpn=math.nan))),
         hooks=[book, Average()]).train()
    key = 'model.teacher.weight'
    assert not torch.equal(book.pages[1][key], book.pages[2][key])
    assert torch.equal(book.pages[2][key], book.pages[3][key])


def test_torch_compile(tmp_path):
    torch.manual_seed(0)
    book = Book()
    runner = make(ToyDetector(), tmp_path, Batches((3, dict(rpn=math.nan))),
                  hooks=[book])
    runner.cfg.compile = dict(backend='eager')
    runner.train()
    assert runner.optim_wrapper.stop_rule.total == 1
    assert torch.isfinite(book.pages[-1]['model.rpn_head.out.bias']).all()


def test_several_updates_a_step_are_refused_in_one_line(tmp_path):
    class Twice(ToyDetector):

        def train_step(self, data, optim_wrapper):
            super().train_step(data, optim_wrapper)
            return super().train_step(data, optim_wrapper)

    runner = make(Twice(), tmp_path, Batches())
    with pytest.raises(RuntimeError, match='several times') as caught:
        runner.train()
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('option', [
    pytest.param(dict(type='AdamW', lr=.01, fused=True), marks=needs_fused),
    dict(type='AdamW', lr=.01, foreach=True),
    dict(type='SGD', lr=.01, momentum=.9, weight_decay=.1)])
@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float32'])
def test_every_optimizer_and_dtype(tmp_path, option, dtype):
    """As without the iterations that were skipped."""
    (tmp_path / 'a').mkdir(), (tmp_path / 'b').mkdir()
    settings = dict(optimizer=option, dtype=dtype)
    bad = (0, dict(rpn=math.nan)), (3, dict(x=math.inf))
    _, ours = run(tmp_path / 'a', Batches(*bad), **settings)
    torch.manual_seed(0)
    book = Book()
    reference = make(ToyDetector(), tmp_path / 'b', Batches(), hooks=[book],
                     **settings)
    NoStep(0, 3)(reference)
    reference.train()
    for left, right in zip(ours, book.pages):
        assert differing(left, right) == []


def test_what_a_forward_writes_to_the_hub_is_taken_back(tmp_path):
    class Talking(ToyDetector):

        def forward(self, inputs, data_samples=None, mode='loss'):
            hub = MessageHub.get_current_instance()
            hub.update_scalar('train/own', 1.)
            hub.update_info('own', hub.get_info('own', 0) + 1)
            return super().forward(inputs, data_samples, mode)

    runner = make(Talking(), tmp_path, Batches((0, dict(rpn=math.nan)),
                                               (3, dict(rpn=math.nan))))
    runner.train()
    hub = runner.message_hub
    assert hub.get_info('own') == 6
    assert len(hub.get_scalar('train/own').data[0]) == 6


@pytest.mark.parametrize('priority', ['HIGHEST', 49, 'NORMAL', 'VERY_LOW',
                                      'LOWEST'])
@pytest.mark.parametrize('accumulate', [1, 2])
def test_an_average_of_any_priority(tmp_path, priority, accumulate):
    runner, _ = run(tmp_path, Batches((3, dict(x=math.inf))), batches=4,
                    accumulative_counts=accumulate,
                    hooks=[dict(EMA, priority=priority)])
    (ema, ) = [hook.ema_model for hook in runner.hooks
               if hasattr(hook, 'ema_model')]
    assert ema.steps == (3 if accumulate == 1 else 2)
    assert all(torch.isfinite(value).all()
               for value in ema.state_dict().values())


def test_a_hook_that_keeps_an_average_by_hand(tmp_path):
    class Shadow(Hook):

        def before_train(self, runner):
            self.shadow = copy.deepcopy(runner.model.state_dict())
            self.runner, self.steps, self.seen = runner, 0, []

        def after_train_iter(self, runner, batch_idx, data_batch=None,
                             outputs=None):
            self.steps += 1
            for name, value in runner.model.named_parameters():
                self.shadow[name].lerp_(value.data, .5)
            self.seen.append(self.shadow['rpn_head.out.weight'].clone())

    shadow = Shadow()
    run(tmp_path, Batches((3, dict(rpn=math.nan))), hooks=[shadow])
    assert shadow.steps == 7 and len(shadow.seen) == 8
    assert torch.equal(shadow.shadow['rpn_head.out.weight'], shadow.seen[-1])


def test_what_hooks_and_validation_write_inside_a_window_stays(tmp_path):
    class Between(Hook):

        def after_train_iter(self, runner, batch_idx, data_batch=None,
                             outputs=None):
            if batch_idx == 2:
                runner.model.use_l1 = True
                runner.message_hub.update_info('best_score', .9)

    runner, _ = run(tmp_path, Batches((3, dict(rpn=math.nan))),
                    accumulative_counts=2, hooks=[Between()])
    assert runner.model.use_l1 is True
    assert runner.message_hub.get_info('best_score') == .9
    assert runner.message_hub.get_info('iter') == 7
    assert len(runner.message_hub.get_scalar('train/lr').data[0]) == 8
    (path, ) = tmp_path.glob('*/nanfix/incidents.jsonl')
    assert [record['iter'] for record in read_log(path)] == [4]


def test_a_second_before_run_changes_nothing(tmp_path):
    hook = NanGuardHook(init_scale=64.)
    runner, _ = run(tmp_path, Batches((3, dict(box=1e37))), hooks=[hook])
    state = runner.optim_wrapper.state_dict()['loss_scaler']
    runner.call_hook('before_run')
    assert runner.optim_wrapper.state_dict()['loss_scaler'] == state
    assert state['scale'] == 32 and state['nanfix_total'] == 1


def test_off_turns_the_hook_off_too(tmp_path, monkeypatch):
    monkeypatch.setenv('MMDET_NANFIX', 'off')
    runner, _ = run(tmp_path, Batches(), wrapper='OptimWrapper',
                    hooks=[dict(type='NanGuardHook')])
    assert type(runner.optim_wrapper) is OptimWrapper


@pytest.mark.parametrize('accumulate', [1, 2])
def test_a_hook_that_holds_the_wrapper(tmp_path, accumulate):
    """Its average is restored, the guard's own counters are not."""

    class Holding(Hook):

        def before_train(self, runner):
            self.wrapper, self.average = runner.optim_wrapper, {}
            self.updates = 0

        def after_train_iter(self, runner, batch_idx, data_batch=None,
                             outputs=None):
            weight = runner.model.rpn_head.out.weight.detach()
            self.average = {'w': self.average.get('w', weight) * .9
                            + weight * .1}
            self.updates += 1

    hook = Holding()
    runner, _ = run(tmp_path, Batches((4, dict(rpn=math.nan))), hooks=[hook],
                    accumulative_counts=accumulate)
    assert runner.optim_wrapper.inner_count == 8
    assert runner.optim_wrapper.stop_rule.total == 1
    assert runner.optim_wrapper.stop_rule.steps == 8 // accumulate
    assert hook.updates == 8 - accumulate


def test_a_hook_that_comes_late(tmp_path):
    class Late(Hook):

        def after_train_iter(self, runner, batch_idx, data_batch=None,
                             outputs=None):
            self.average += 1

    late = Late()
    late.average = torch.zeros(1)

    class Adding(Hook):

        def before_train_epoch(self, runner):
            runner.register_hook(late, priority='LOWEST')

    run(tmp_path, Batches((4, dict(rpn=math.nan))), hooks=[Adding()])
    assert late.average.item() == 7


@pytest.mark.parametrize('wrapper', ['AmpOptimWrapper',
                                     'NanSafeOptimWrapper'])
def test_settings_of_the_wrapper_stay_where_the_hook_has_none(tmp_path,
                                                              wrapper):
    runner, _ = run(tmp_path, Batches(), batches=1, wrapper=wrapper,
                    nanfix=dict(max_consecutive=3),
                    hooks=[dict(type='NanGuardHook', init_scale=128.)])
    assert runner.optim_wrapper.stop_rule.max_consecutive == 3


class Heat(Hook):
    """After the first step a head leaves half's range."""

    def after_train_iter(self, runner, *args, **kwargs):
        if runner.iter == 0:
            make_hot(runner.model.rpn_head)
            # Its gradients are long, but that is not the point here.
            runner.optim_wrapper.guard.history.accept(1e9)


def test_the_losses_of_a_step_that_was_made_again_are_printed(tmp_path):
    """Hooks see those, averages go on, and nothing stops the run."""
    runner, pages = run(
        tmp_path, Batches(), batches=5, hooks=[
            Heat(), dict(type='mmdet.CheckInvalidLossHook', interval=1),
            EMA], optimizer=dict(type='SGD', lr=1e-12))
    assert runner.optim_wrapper.stop_rule.saved == 3
    assert runner.optim_wrapper.stop_rule.total == 0
    history, _ = runner.message_hub.log_scalars['train/loss_first'].data
    assert len(history) == 5 and all(map(math.isfinite, history))
    (hook, ) = [hook for hook in runner.hooks if hasattr(hook, 'ema_model')]
    assert hook.ema_model.steps == 5
    assert [page for page in pages if any(
        not torch.isfinite(value).all() for key, value in page.items()
        if value.is_floating_point())] == []


@pytest.mark.parametrize('clip, anew', [
    ({}, False), (dict(clip_grad=None), True),
    (dict(clip_grad=dict(max_norm=3.)), False),
    (dict(clip_grad=dict(type='value', clip_value=3.)), True)])
@pytest.mark.parametrize('by_hook', [False, True])
def test_a_patch_knows_what_the_config_says(tmp_path, clip, anew, by_hook):
    hooks = [dict(type='NanGuardHook', max_consecutive=9)] if by_hook else []
    runner, _ = run(tmp_path, Batches(), batches=1, hooks=hooks, **clip,
                    cfg=dict(optim_wrapper=clip, model=dict(type='X')))
    told = runner.optim_wrapper.config
    assert (told.clips_anew, told.by_hook) == (anew, by_hook)
    assert told.model == dict(type='X')


@pytest.mark.parametrize('given', [[], [dict(type='NanGuardHook')]])
def test_every_hook_begins_once(tmp_path, given, monkeypatch):
    """The guard's own hooks join while the runner walks through its list."""
    begun = []
    monkeypatch.setattr(RuntimeInfoHook, 'before_run', lambda hook, runner: (
        begun.append(('info', 'run'))))

    class Begins(Hook):

        def __init__(self, priority):
            self.priority = priority

        def before_run(self, runner):
            begun.append((self.priority, 'run'))

        def before_train(self, runner):
            begun.append((self.priority, 'train'))

    names = ['HIGHEST', 'VERY_HIGH', 'HIGH', 'NORMAL', 'LOWEST']
    run(tmp_path, Batches(), batches=1, hooks=[
        *given, *map(Begins, names)])
    assert sorted(begun) == sorted([('info', 'run'), *(
        (name, when) for name in names for when in ('run', 'train'))])


def test_two_runs_of_one_name_write_to_folders_of_their_own(tmp_path):
    """MMEngine keeps its loggers by the name of the experiment."""
    paths = []
    for name in 'ab':
        folder = tmp_path / name / 'work' / 'dirs'
        folder.mkdir(parents=True)
        runner, _ = run(folder, Batches((1, dict(rpn=math.nan))), batches=2)
        paths.append(runner.optim_wrapper.reporter.path)
    assert paths[0].startswith(str(tmp_path / 'a'))
    assert paths[1].startswith(str(tmp_path / 'b'))
    assert [len(list(read_log(path))) for path in paths] == [1, 1]
