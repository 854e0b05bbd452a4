"""MMEngine and MMDetection 3.x: the optimizer wrapper.

:class:`NanSafeAmpOptimWrapper` translates between MMEngine's wrapper
protocol and :class:`~mmdet_nanfix.step.GuardedStep`.
"""
import contextlib
import logging
import os
from typing import Any, Dict, Iterator, Optional, Tuple, Union

import torch
from mmengine import dist
from mmengine.hooks import RuntimeInfoHook
from mmengine.logging import MMLogger, print_log
from mmengine.model import is_model_wrapper
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner.checkpoint import save_checkpoint, weights_to_cpu
from mmengine.visualization import Visualizer
from torch import Tensor, nn

from . import emulation
from .finite import bad_tensors
from .policy import LossScale, LossScaleSettings, StopRule
from .records import Incident, IncidentLog, NonFiniteError, log_name
from .report import Summary
from .step import GuardedStep, Verdict

__all__ = [
    'NanSafeAmpOptimWrapper', 'NanfixRuntimeInfoHook', 'StockAmpOptimWrapper',
    'shadow_stock_names'
]

_STOP_SETTINGS = ('max_consecutive', )
_DTYPES = ('float16', 'bfloat16', 'float32', 'float64')
_HALVES = (torch.float16, torch.bfloat16)


def _say(message: str, level: int = logging.INFO) -> None:
    print_log(f'nanfix: {message}', logger='current', level=level)


def _warn(message: str) -> None:
    _say(message, logging.WARNING)


def _log_folder() -> Optional[str]:
    """``<work_dir>/<timestamp>``, where the running Runner logs to."""
    log_file = getattr(MMLogger.get_current_instance(), '_log_file', None)
    return os.path.dirname(os.path.abspath(log_file)) if log_file else None


def _any_rank(flag: bool) -> bool:
    """Whether a flag is up on any rank; a collective, after failures."""
    if dist.get_world_size() == 1:
        return flag
    device = dist.get_comm_device(None)
    shared = torch.tensor(float(flag), device=device)
    dist.all_reduce(shared, 'max')
    return bool(shared.item())


def _checked_dtype(dtype: Union[str, torch.dtype, None]) -> torch.dtype:
    if dtype is None:
        return torch.float16
    name = dtype if isinstance(dtype, str) else str(dtype)[len('torch.'):]
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError('Expected argument `dtype` to be a str or a '
                        f'torch.dtype, but got {dtype!r}')
    if name not in _DTYPES:
        raise ValueError(f'Expected argument `dtype` to be one of {_DTYPES}, '
                         f'but got {dtype!r}')
    return getattr(torch, name)


def _split_settings(nanfix: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Settings of the loss scale and of the stop rule."""
    if nanfix is None:
        return {}, {}
    if not isinstance(nanfix, dict):
        raise TypeError('Expected argument `nanfix` to be a dict of settings,'
                        f' but got {nanfix!r}')
    stop = {key: nanfix[key] for key in _STOP_SETTINGS if key in nanfix}
    scale = {key: value for key, value in nanfix.items() if key not in stop}
    accepted = (*_STOP_SETTINGS, *LossScaleSettings.__dataclass_fields__)
    for key in scale:
        if key not in accepted:
            raise TypeError(f'`nanfix` has no setting {key!r}; accepted are '
                            f'{", ".join(accepted)}')
    return scale, stop


def _device_of(optimizer: Any) -> str:
    """Device type of what is optimized; ``cpu`` for nothing."""
    groups = getattr(optimizer, 'param_groups', [])
    return next((parameter.device.type for group in groups
                 for parameter in group['params']), 'cpu')


def _scaler(device: str, use_fsdp: bool, scale: float) -> Any:
    """Torch's scaler: it scales, unscales and finds; we decide."""
    if use_fsdp:
        from torch.distributed.fsdp.sharded_grad_scaler import (
            ShardedGradScaler,
        )
        elsewhere = {} if device == 'cuda' else {'device': device}
        return ShardedGradScaler(init_scale=scale, **elsewhere)
    if device == 'cpu' and not hasattr(torch, 'get_autocast_dtype'):
        raise RuntimeError('Half precision on a CPU needs torch 2.4 or newer,'
                           f' but this is torch {torch.__version__}')
    if hasattr(torch.amp, 'GradScaler'):
        return torch.amp.GradScaler(device, init_scale=scale)
    return torch.cuda.amp.GradScaler(init_scale=scale)


@OPTIM_WRAPPERS.register_module()
class NanSafeAmpOptimWrapper(AmpOptimWrapper):
    """``AmpOptimWrapper`` that survives and explains non-finite numbers.

    An optimizer step whose losses or gradients are not finite is skipped,
    recorded per head in ``<work_dir>/<timestamp>/nanfix/incidents.jsonl``
    and told in one line. The loss scale starts at 256, backs off when
    gradients overflow, never below ``min_scale``. Too many skipped steps
    raise :class:`~mmdet_nanfix.NonFiniteError` on all ranks.

    A healthy step reads from the device as often as the stock class does:
    once for the check of the gradients, once for ``grad_norm`` if gradients
    are clipped. With a fused optimizer the check is one read more.

    Args:
        loss_scale: ``'dynamic'``; a number, the start value; or a dict of
            ``init_scale``, ``growth_factor``, ``backoff_factor``,
            ``growth_interval``, ``min_scale``, ``max_scale``,
            ``hysteresis``, ``allow_high_start``, ``enabled`` (see
            :class:`~mmdet_nanfix.policy.LossScaleSettings`). A start of 512
            or more is lowered to 256 unless ``allow_high_start``.
        dtype: Autocast dtype: ``'float16'`` (default), ``'bfloat16'``,
            ``'float32'`` or ``'float64'``, or the ``torch.dtype``. On a CPU
            the two half types are emulated with CUDA's numerics.
        use_fsdp: Use the ``ShardedGradScaler``.
        nanfix: Settings that win over ``loss_scale``, which ``--amp``
            overwrites: any of the dict above and ``max_consecutive``, the
            number of skipped steps in a row after which training stops
            (default 20; None for never).
        **kwargs: Of ``OptimWrapper``: ``optimizer``,
            ``accumulative_counts``, ``clip_grad``.

    Raises:
        TypeError: An argument of a wrong type, or a setting that does not
            exist.
        ValueError: A value that is impossible.
    """

    def __init__(self,
                 loss_scale: Any = 'dynamic',
                 dtype: Union[str, torch.dtype, None] = None,
                 use_fsdp: bool = False,
                 nanfix: Optional[Dict[str, Any]] = None,
                 **kwargs: Any) -> None:
        overrides, stop = _split_settings(nanfix)
        settings = LossScaleSettings.from_arguments(loss_scale, overrides)
        self.cast_dtype = _checked_dtype(dtype)
        self._stop = StopRule(**stop)
        self._device = _device_of(kwargs.get('optimizer'))
        self._stock = self._device not in ('cuda', 'cpu')
        self._guard: Optional[GuardedStep] = None
        if self._stock:
            super().__init__(loss_scale=loss_scale, dtype=dtype,
                             use_fsdp=use_fsdp, **kwargs)
            return
        # The stock constructor refuses a CPU; what it sets is set here.
        OptimWrapper.__init__(self, **kwargs)
        self._scale = LossScale(settings)
        self._scale_update_param = None
        self.loss_scaler = _scaler(self._device, use_fsdp, self._scale.scale)
        self._log: Optional[IncidentLog] = None
        self._summary = Summary()
        self._drawing = True
        self._closed = False

    def initialize_count_status(self, model: nn.Module, init_counts: int,
                                max_counts: int) -> None:
        """Arm the guard; the runner calls this right before training."""
        super().initialize_count_status(model, init_counts, max_counts)
        self._guard = None
        if self._stock:
            _warn(f'devices of type {self._device!r} are not guarded: the '
                  'optimizer wrapper behaves as the stock class')
            return
        self._arm(model)

    def _arm(self, model: nn.Module) -> GuardedStep:
        if self._guard is not None:
            return self._guard
        model = model.module if is_model_wrapper(model) else model
        rank = dist.get_rank()
        self._guard = GuardedStep(model, self.optimizer, self._scale,
                                  self._stop, self._clock, rank, _any_rank)
        folder = _log_folder()
        path = os.path.join(folder, 'nanfix', log_name(rank)) if (
            folder) else None
        self._log = IncidentLog(path, _warn)
        if self._scale.note:
            _say(self._scale.note)
        _say(self._settings_line(self._log_path()))
        return self._guard

    def _log_path(self) -> Optional[str]:
        """The log file, where there is one that can be written."""
        log = self._log
        return log.path if log is not None and log.writable else None

    def _clock(self) -> Tuple[Optional[int], int]:
        """Epoch and global iteration, both from 1."""
        info = self.message_hub.runtime_info
        epoch = info.get('epoch')
        # Without a runner the backwards count the iterations.
        iteration = info['iter'] + 1 if 'iter' in info else self._inner_count
        return None if epoch is None else int(epoch) + 1, int(iteration)

    def _settings_line(self, path: Optional[str]) -> str:
        rules = self._scale.settings
        interval = rules.growth_interval or '500 until the first overflow, ' \
            'then 2000'
        emulated = ' (emulated)' if self._device == 'cpu' and (
            self.cast_dtype in _HALVES) else ''
        return (f'guarding {str(self.cast_dtype)[6:]}{emulated} training; '
                f'loss scale {self._scale.scale:g} in {rules.min_scale:g} to '
                f'{rules.max_scale:g}, backoff {rules.backoff_factor:g}, '
                f'growth {rules.growth_factor:g} after {interval} good steps,'
                f' hysteresis {rules.hysteresis}; stop after '
                f'{self._stop.max_consecutive} skipped steps in a row; '
                f'incidents go to {path or "the console only"}')

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Enter autocast and watch the losses of one forward."""
        if self._stock:
            with super().optim_context(model):
                yield
            return
        guard = self._arm(model)
        bare = model.module if is_model_wrapper(model) else model
        with OptimWrapper.optim_context(self, model), guard.watch(bare), (
                self._autocast()):
            yield

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        if self.cast_dtype not in _HALVES:
            yield
        elif self._device == 'cpu':
            with emulation.cuda_autocast(self.cast_dtype):
                yield
        else:
            with torch.autocast(self._device, self.cast_dtype):
                yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss, with its anchor term, and run the backward."""
        if self._stock or self._guard is None:
            super().backward(loss, **kwargs)
            return
        super().backward(self._guard.attach(loss), **kwargs)

    def step(self, **kwargs: Any) -> None:
        """Step, or skip and record; then update the loss scale.

        Raises:
            NonFiniteError: Too many steps were skipped.
        """
        if self._stock:
            super().step(**kwargs)
            return
        found_inf = self._found_inf()
        if not found_inf:
            if self.clip_grad_kwargs:
                self._clip_grad()
            self._apply(**kwargs)
        before = self._scale.scale
        verdict = self._guard.judge(found_inf) if self._guard else (
            self._judge_unarmed(found_inf))
        self.loss_scaler.update(self._scale.scale)
        if self._scale.scale != before:
            self._draw('scale', self._scale.scale)
        if verdict.incident is not None:
            self._tell(verdict.incident)
        if verdict.stop is not None or (
                self._inner_count == self._max_counts):
            self.close()
        if verdict.stop is not None:
            raise NonFiniteError(self._stop_message(verdict.stop),
                                 verdict.incident)

    def _found_inf(self) -> bool:
        """Result of the check of the gradients; the one read of a step.

        ``GradScaler.step`` makes the same read. It is made here, because
        clipping spreads one NaN over all gradients and must wait for it.
        """
        scaler = self.loss_scaler
        if self._fused and not self.clip_grad_kwargs:
            # A fused optimizer unscales by itself, half weights too.
            scaler._check_inf_per_device(self.optimizer)
        else:
            scaler.unscale_(self.optimizer)
        state = scaler._per_optimizer_states[id(self.optimizer)]
        found = state['found_inf_per_device'].values()
        return bool(sum(flag.item() for flag in found))

    @property
    def _fused(self) -> bool:
        return getattr(self.optimizer, '_step_supports_amp_scaling', False)

    def _apply(self, **kwargs: Any) -> None:
        if self._fused:
            # The scaler tells it whether gradients are unscaled already.
            self.loss_scaler.step(self.optimizer, **kwargs)
        else:
            # The scaler's own step would read the flag a second time.
            self.optimizer.step(**kwargs)

    def _judge_unarmed(self, found_inf: bool) -> Verdict:
        """Without a model there is no evidence; scale and skip still work."""
        self._scale.update(losses_finite=True, grads_finite=not found_inf)
        return Verdict(stop=self._stop.update(skipped=found_inf))

    def _tell(self, incident: Incident) -> None:
        self._summary.add(incident)
        if self._log is not None:
            self._log.write(incident)
        _warn(incident.summary())
        self._draw('incidents', self._stop.total)
        self._draw('skipped', self._stop.total)

    def _draw(self, name: str, value: float) -> None:
        """One scalar to the visualizer's backends, where there is one."""
        if not (self._drawing and Visualizer._instance_dict
                and dist.is_main_process()):
            return
        try:
            Visualizer.get_current_instance().add_scalar(
                f'nanfix/{name}', value, step=self._clock()[1])
        except Exception as error:
            # Any backend, any failure: a full disk, a lost server.
            self._drawing = False
            _warn('the visualizer takes no scalars '
                  f'({type(error).__name__}: {error}); training goes on')

    def close(self) -> None:
        """Print the table at the end, once."""
        if not self._stock and not self._closed and self._summary.rows:
            self._closed = True
            path = self._log_path()
            where = f'details: python -m mmdet_nanfix.report ' \
                f'{os.path.dirname(os.path.dirname(path))}' if path else (
                    'no log was kept')
            _say(f'{self._stop.total} of {self._stop.steps} optimizer steps '
                 f'were skipped, loss scale now {self._scale.scale:g}; '
                 f'{where}\n{self._summary.text()}')

    def _stop_message(self, reason: str) -> str:
        path = self._log_path()
        return (f'Training was stopped: {reason}. {self._save_weights()} '
                f'Which head went bad is in {path or "the lines above"}; '
                'mend the cause, or train on with '
                'optim_wrapper.nanfix.max_consecutive=None.')

    def _save_weights(self) -> str:
        """Save what no skipped step has touched; say where."""
        if self._guard is None or self._log is None or (
                self._log.path is None):
            return 'No weights were saved, since no log folder is known.'
        path = os.path.join(os.path.dirname(self._log.path),
                            f'stopped_iter_{self._clock()[1]}.pth')
        model = self._guard.model
        if dist.is_main_process():
            try:
                save_checkpoint({
                    # As MMEngine counts: steps and epochs that are done.
                    'meta': {'iter': self._clock()[1],
                             'epoch': (self._clock()[0] or 1) - 1},
                    'state_dict': weights_to_cpu(model.state_dict()),
                    'optimizer': self.state_dict(),
                }, path)
            except OSError as error:
                return f'The weights could not be saved ({error}).'
        buffers = [name for name, _ in model.named_buffers()]
        bad = [buffers[i] for i in bad_tensors(
            [buffer for _, buffer in model.named_buffers()])]
        note = f' ({len(bad)} buffers in it are not finite: {bad[0]}, ...)' \
            if bad else ''
        return ('The weights, untouched by them, are in '
                f'{path}{note}, for load_from.')

    def state_dict(self) -> Dict[str, Any]:
        """The optimizer's state and, as plain numbers, the loss scale's."""
        if self._stock:
            return super().state_dict()
        state = OptimWrapper.state_dict(self)
        state['loss_scaler'] = {**self._scale.state_dict(),
                                **self._stop.state_dict()}
        return state

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Load a checkpoint of this class or of either stock class."""
        if self._stock:
            super().load_state_dict(state_dict)
            return
        stored = state_dict.pop('loss_scaler', {})
        self._stop.load_state_dict(stored)
        complaint = self._scale.load_state_dict(stored)
        if complaint:
            _warn(complaint)
        self.loss_scaler.load_state_dict(self._scale.state_dict())
        super().load_state_dict(state_dict)


class NanfixRuntimeInfoHook(RuntimeInfoHook):
    """MMEngine's hook, which every runner has, with the table at the end.

    A run that another hook stops early does not reach its last iteration,
    which is where the wrapper itself prints the table.
    """

    def after_train(self, runner: Any) -> None:
        """Let the wrapper print what it has not printed yet."""
        super().after_train(runner)
        if isinstance(runner.optim_wrapper, NanSafeAmpOptimWrapper):
            runner.optim_wrapper.close()


class StockAmpOptimWrapper(AmpOptimWrapper):
    """MMEngine's class, but for the argument ``nanfix``, which it drops.

    It stands for ``AmpOptimWrapper`` when the plugin is off, so that a
    config with settings still builds.
    """

    def __init__(self, *args: Any, nanfix: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def shadow_stock_names(guarded: bool = True) -> None:
    """Make mmdet's scope resolve two of MMEngine's names to ours.

    ``AmpOptimWrapper`` and ``RuntimeInfoHook``.

    Only in mmdet's own registry: MMEngine's, and so every other scope,
    keeps the stock class.

    Args:
        guarded: False keeps the stock behaviour.

    Raises:
        ImportError: mmdet is not installed.
    """
    from mmdet.registry import HOOKS as MMDET_HOOKS
    from mmdet.registry import OPTIM_WRAPPERS as MMDET_OPTIM_WRAPPERS

    MMDET_OPTIM_WRAPPERS.register_module(
        name='AmpOptimWrapper', force=True,
        module=NanSafeAmpOptimWrapper if guarded else StockAmpOptimWrapper)
    if guarded:
        MMDET_HOOKS.register_module(
            name='RuntimeInfoHook', force=True, module=NanfixRuntimeInfoHook)
