"""Guard ``AmpOptimWrapper``: half precision with a dynamic loss scale."""
from __future__ import annotations

import contextlib
from typing import Any

import torch
from mmengine import dist
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import Tensor, nn

from ...guard.rules import LossScale, LossScaleSettings
from ...torch_support import HALVES, scaler_for
from .optim_wrapper import GuardedOptimWrapper
from .reporter import warn
from .settings import (
    GUARDED_DEVICES,
    checked_dtype,
    device_of,
    not_guarded,
    split_settings,
)

__all__ = ['NanSafeAmpOptimWrapper', 'StockAmpOptimWrapper',
           'UnguardedAmpOptimWrapper']


@OPTIM_WRAPPERS.register_module()
class NanSafeAmpOptimWrapper(GuardedOptimWrapper, AmpOptimWrapper):
    """``AmpOptimWrapper`` that survives and explains non-finite numbers.

    An optimizer step whose losses, gradients or buffers are not finite is
    skipped, what its forwards changed is taken back, and it is recorded per
    head in ``<work_dir>/<timestamp>/nanfix/incidents.jsonl`` and told in one
    line. The loss scale starts at 256, backs off when gradients overflow,
    never below ``min_scale``. Too many skipped steps raise
    :class:`~mmdet_nanfix.NonFiniteError` on all ranks.

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
            overwrites: any of the dict above; ``max_consecutive``, the
            number of skipped steps in a row after which training stops
            (default 20; None for never); ``fp32``, what is computed in
            fp32: ``'heads'`` (default), ``'losses'`` or None, see
            :mod:`~mmdet_nanfix.fp32.regions`. Settings of ``NanGuardHook`` win
            over these.
        **kwargs: Of ``OptimWrapper``: ``optimizer``,
            ``accumulative_counts``, ``clip_grad``.

    Raises:
        TypeError: An argument of a wrong type, or a setting that does not
            exist.
        ValueError: A value that is impossible.
    """

    def __new__(cls, *args: Any, nanfix: dict[str, Any] | None = None,
                **kwargs: Any) -> Any:
        """Make the stock class where the device is not guarded."""
        device = device_of(kwargs.get('optimizer'))
        if device in GUARDED_DEVICES:
            return super().__new__(cls)
        split_settings(nanfix)
        checked_dtype(kwargs.get('dtype'))
        return UnguardedAmpOptimWrapper(*args, **kwargs)

    def __init__(self,
                 loss_scale: Any = 'dynamic',
                 dtype: str | torch.dtype | None = None,
                 use_fsdp: bool = False,
                 nanfix: dict[str, Any] | None = None,
                 **kwargs: Any) -> None:
        self.cast_dtype = checked_dtype(dtype)
        # The stock constructor refuses a CPU; what it sets is set here.
        OptimWrapper.__init__(self, **kwargs)
        self._scale_update_param = None
        self._loss_scale, self._use_fsdp = loss_scale, use_fsdp
        self.guard_with(nanfix)

    def _scale_of(self, overrides: dict[str, Any]) -> LossScale:
        if self._is_emulated:
            from ...emulation import require
            require()
        scale = LossScale(LossScaleSettings.from_arguments(
            self._loss_scale, overrides))
        self._in_force = scale.scale
        self.loss_scaler = scaler_for(device_of(self.optimizer),
                                      self._use_fsdp, scale.scale)
        return scale

    def _precision(self) -> str:
        emulated = ' (emulated)' if self._is_emulated else ''
        return f'{str(self.cast_dtype)[6:]}{emulated}'

    @property
    def is_half(self) -> bool:
        """Whether autocast computes in half precision."""
        return self.cast_dtype in HALVES

    @property
    def _is_emulated(self) -> bool:
        return self.is_half and device_of(self.optimizer) == 'cpu'

    def half_op(self) -> tuple[str | None, int]:
        """Return the half operation that is emulated right now, or None."""
        if not self._is_emulated:
            return None, 0
        from ...emulation import computing
        return computing()

    def _autocast(self) -> Any:
        device = device_of(self.optimizer)
        dtype = torch.bfloat16 if 'bfloat16' in self.precision.extra else (
            self.cast_dtype)
        if dtype not in HALVES or 'all' in self.precision.extra:
            return contextlib.nullcontext()
        if device == 'cpu':
            from ...emulation import cuda_autocast
            return cuda_autocast(dtype)
        return torch.autocast(device, dtype)

    def found_inf(self) -> bool:
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
        found = list(state['found_inf_per_device'].values())
        flag = self.guard.flag if self.guard is not None else None
        if flag is not None:
            # No parameter carries the state of the losses: one number more.
            flag = flag.isnan().float()
            dist.all_reduce(flag, 'max')
            found.append(flag)
        return bool(sum(flag.item() for flag in found))

    @property
    def _fused(self) -> bool:
        return getattr(self.optimizer, '_step_supports_amp_scaling', False)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale."""
        scaled: Tensor = self.loss_scaler.scale(loss)
        return scaled

    def gradient_norm(self) -> Tensor | None:
        """Return the L2 norm of the gradients, unscaled; no sync."""
        norm = super().gradient_norm()
        # A fused optimizer unscales by itself, later.
        return norm / self._in_force if norm is not None and (
            self._fused and not self.clip_grad_kwargs) else norm

    def _apply(self, **kwargs: Any) -> None:
        if self._fused:
            # The scaler tells it whether gradients are unscaled already.
            self.loss_scaler.step(self.optimizer, **kwargs)
        else:
            # The scaler's own step would read the flag a second time.
            self.optimizer.step(**kwargs)

    def set_scale(self, scale: float | None = None) -> None:
        """Scale by a loss scale from now on; None for that of the rules."""
        scale = self.scale_rules.scale if scale is None else scale
        if self.loss_scaler._scale is None and self.guard is not None:
            # Nothing was scaled where every forward raised.
            self.loss_scaler.scale(torch.zeros(
                (), device=device_of(self.optimizer)))
        self.loss_scaler.update(scale)
        self._in_force = scale

    def _reload(self) -> None:
        self._in_force = self.scale_rules.scale
        self.loss_scaler.load_state_dict(self.scale_rules.state_dict())


class StockAmpOptimWrapper(AmpOptimWrapper):
    """MMEngine's class, but for the argument ``nanfix``, which it drops.

    It stands for ``AmpOptimWrapper`` when the plugin is off, so that a
    config with settings still builds.
    """

    #: It can be converted into a guarded wrapper.
    is_stock = True

    def __init__(self, *args: Any, nanfix: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class UnguardedAmpOptimWrapper(StockAmpOptimWrapper):
    """MMEngine's class on devices that are not guarded; it says so."""

    #: Nobody else needs to.
    says_so = True

    def initialize_count_status(self, model: nn.Module, init_counts: int,
                                max_counts: int) -> None:
        """Say once, right before training, that nothing is guarded."""
        super().initialize_count_status(model, init_counts, max_counts)
        warn(not_guarded(device_of(self.optimizer)))
