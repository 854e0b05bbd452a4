"""MMEngine's hooks: what the guarded step needs of a runner.

The optimizer wrapper decides in the middle of a training step. What other
hooks do after it (averaged models, printed losses, checkpoints) is guarded
here.
"""
from __future__ import annotations

import math
from typing import Any, Iterator

import torch
from mmengine.hooks import CheckpointHook, Hook, RuntimeInfoHook
from mmengine.registry import HOOKS
from torch import Tensor

from ...guard import RunConfig
from ...guard.checks import bad_tensors, can_be_checked
from ...guard.state import AveragedModels
from .convert import guard_existing_wrapper
from .optim_wrapper import GuardedOptimWrapper
from .reporter import warn
from .settings import is_off, split_settings

__all__ = ['NanGuardHook', 'NanfixRuntimeInfoHook']

def _guards(runner: Any) -> bool:
    """Whether the runner's steps are guarded."""
    wrapper = getattr(runner, 'optim_wrapper', None)
    return isinstance(wrapper, GuardedOptimWrapper)


class NanfixRuntimeInfoHook(RuntimeInfoHook):
    """MMEngine's hook, which every runner has, for guarded runs.

    It reads every loss once an iteration anyway. A loss that is not finite
    is left out of the printed means, and hooks after this one see the last
    finite value in its place: such an iteration changes nothing, so that
    there is nothing to abort for.
    """

    def before_run(self, runner: Any) -> None:
        """Add the guard's hook where the config has none."""
        super().before_run(runner)
        if _guards(runner) and not any(
                isinstance(hook, NanGuardHook) for hook in runner.hooks):
            hook = NanGuardHook()
            # Another list: the runner is walking through this one.
            runner._hooks = list(runner._hooks)
            runner.register_hook(hook)
            # Its turn has passed, or is not in the runner's list.
            hook.before_run(runner)

    def after_train_iter(self, runner: Any, batch_idx: int,
                         data_batch: Any = None,
                         outputs: dict[str, Any] | None = None) -> None:
        """Log what is finite."""
        if not _guards(runner) or outputs is None:
            super().after_train_iter(runner, batch_idx, data_batch, outputs)
            return
        hub = runner.message_hub
        skipped = runner.optim_wrapper.skipped
        if runner.optim_wrapper.logged:
            # The losses of the step that was made in the end.
            outputs.update(runner.optim_wrapper.logged)
        for key, value in outputs.items():
            number = value.item() if isinstance(value, Tensor) else value
            is_loss = 'loss' in key and isinstance(number, float)
            if is_loss and not math.isfinite(number):
                known = hub.log_scalars.get(f'train/{key}')
                last = known.current() if known is not None else 0.
                outputs[key] = torch.tensor(float(last))
            elif not skipped:
                hub.update_scalar(f'train/{key}', number)

    def after_train(self, runner: Any) -> None:
        """Let the wrapper print what it has not printed yet."""
        super().after_train(runner)
        if _guards(runner):
            runner.optim_wrapper.close()


@HOOKS.register_module()
class NanGuardHook(Hook):
    """Guards the training of any MMEngine runner.

    With ``AmpOptimWrapper`` in MMDetection's scope it is there by itself;
    in a config it turns the guard on for full precision and for other
    scopes, and takes settings. A skipped step leaves nothing behind in what
    hooks keep either: averaged models with their step counts, and mean
    teachers. No checkpoint is written with non-finite state unannounced.

    It costs nothing in a healthy iteration, but for a copy of the averaged
    model in each window of gradient accumulation.

    Args:
        **settings: As ``nanfix`` of the wrapper, over which they win.

    Raises:
        TypeError: A setting that does not exist, or an optimizer wrapper
            that cannot be guarded.
        ValueError: A value that is impossible.
        RuntimeError: A training step updated parameters several times.
    """

    priority = 'HIGHEST'

    def __init__(self, **settings: Any) -> None:
        split_settings(settings)
        self._settings = settings
        self._averages = AveragedModels([])
        self._kept = False
        self._count = 0
        self._adopted: Any = None

    def before_run(self, runner: Any) -> None:
        """Guard the optimizer wrapper, once it is built."""
        wrapper = getattr(runner, 'optim_wrapper', None)
        if isinstance(wrapper, dict) or wrapper is None or (
                wrapper is self._adopted or is_off()):
            # Validation or test only, or after a training.
            return
        was_guarded = isinstance(wrapper, GuardedOptimWrapper)
        guard_existing_wrapper(wrapper, self._settings)
        self._adopted = wrapper
        if not _guards(runner):
            # On a device that is not guarded.
            return
        given = runner.cfg.get('optim_wrapper')
        given = given if isinstance(given, dict) else {}
        clip = given.get('clip_grad', {})
        model = runner.cfg.get('model')
        wrapper.config = RunConfig(
            clips_anew=clip is None or clip.get('type', 'norm') != 'norm',
            by_hook=bool(self._settings) or not was_guarded,
            model=model if isinstance(model, dict) else None)
        wrapper.reporter.folder = getattr(runner, 'log_dir', None)
        for index, hook in enumerate(runner._hooks):
            if type(hook) is RuntimeInfoHook:
                runner._hooks[index] = NanfixRuntimeInfoHook()

    def before_train(self, runner: Any) -> None:
        """Stand around the other hooks, whatever their priority."""
        if not _guards(runner):
            return
        others = [hook for hook in runner._hooks if hook is not self
                  and not isinstance(hook, _RestoreHook)]
        savers = [index for index, hook in enumerate(others)
                  if isinstance(hook, CheckpointHook)]
        first = min(savers, default=len(others))
        # Another list: the runner is walking through the one it has.
        runner._hooks = [self, *others[:first], _RestoreHook(self),
                         *others[first:], _RestoreHook(self, last=True)]
        self._averages = AveragedModels(
            [hook for hook in others
             if not isinstance(hook, (CheckpointHook, RuntimeInfoHook))],
            besides=[runner, runner.optim_wrapper,
                     runner.optim_wrapper.optimizer, runner.model,
                     *runner.model.modules()])

    def before_train_iter(self, runner: Any, batch_idx: int,
                          data_batch: Any = None) -> None:
        """Keep averaged models at the start of an accumulation window."""
        wrapper = runner.optim_wrapper
        if not _guards(runner):
            return
        last = runner._hooks[-1]
        if not (isinstance(last, _RestoreHook) and last.is_last):
            # A hook was registered in the middle of the training.
            self.before_train(runner)
        self._count = wrapper.inner_count
        wrapper.skipped, wrapper.logged = False, None
        if wrapper._accumulative_counts > 1 and not wrapper.window_open:
            self._keep(runner)

    def after_train_iter(self, runner: Any, batch_idx: int,
                         data_batch: Any = None,
                         outputs: dict[str, Any] | None = None) -> None:
        """Keep averaged models before other hooks update them."""
        if not _guards(runner):
            return
        wrapper = runner.optim_wrapper
        if wrapper.inner_count > self._count + 1:
            raise RuntimeError(
                'a training step that updates parameters several times '
                'cannot be guarded; MMDET_NANFIX=off in the environment '
                'trains it without a guard')
        if wrapper.skipped and wrapper._accumulative_counts == 1:
            self._keep(runner)

    def _keep(self, runner: Any) -> None:
        self._kept = True
        self._averages.copy(
            self._in_the_model(runner),
            often=runner.optim_wrapper._accumulative_counts > 1)

    def _in_the_model(self, runner: Any) -> Iterator[Tensor]:
        """What hooks may update there: all but what the optimizer trains."""
        trained = {
            id(parameter)
            for group in runner.optim_wrapper.param_groups
            for parameter in group['params'] if parameter.requires_grad}
        model = runner.model
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in trained and can_be_checked(tensor):
                yield tensor

    def restore(self, runner: Any, last: bool) -> None:
        """Take back what hooks did in a skipped step.

        Args:
            runner: The runner.
            last: No other hook comes after this.
        """
        if self._kept and runner.optim_wrapper.skipped:
            self._averages.restore()
        if last and not runner.optim_wrapper.window_open:
            self._kept = False


class _RestoreHook(Hook):
    """The guard's later turns: before checkpoints, and at the end.

    Args:
        guard: The hook that has the first turn.
        last: Whether it is the one at the end.
    """

    def __init__(self, guard: NanGuardHook, last: bool = False) -> None:
        self._guard = guard
        self.is_last = last

    def after_train_iter(self, runner: Any, batch_idx: int,
                         data_batch: Any = None,
                         outputs: dict[str, Any] | None = None) -> None:
        """Take back what other hooks did in a skipped step."""
        if _guards(runner):
            self._guard.restore(runner, self.is_last)

    def before_save_checkpoint(self, runner: Any,
                               checkpoint: dict[str, Any]) -> None:
        """Say what in it is not finite; one read from each device."""
        if not self.is_last:
            return
        guard = getattr(runner.optim_wrapper, 'guard', None)
        exempt = {f'{prefix}{name}' for name in (
            guard.buffers.exempt if guard else ())
            for prefix in ('state_dict.', 'ema_state_dict.module.')}
        named = {name: tensor for name, tensor in _tensors(
            {key: checkpoint.get(key) for key in (
                'state_dict', 'ema_state_dict', 'optimizer')})
            if name not in exempt}
        names = list(named)
        bad = [names[i] for i in bad_tensors(list(named.values()))]
        if bad:
            warn(f'the checkpoint of iter {runner.iter + 1} holds '
                 f'{len(bad)} tensors that are not finite: '
                 f'{", ".join(bad[:3])}{", ..." if len(bad) > 3 else ""}')


def _tensors(value: Any, path: str = '') -> Iterator[Any]:
    """Tensors of nested dicts and lists, with where they are."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else (
            enumerate(value))
        for key, item in items:
            yield from _tensors(item, f'{path}.{key}' if path else str(key))
