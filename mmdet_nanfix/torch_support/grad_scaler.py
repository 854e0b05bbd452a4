"""Scale gradients on a CPU, for versions of torch that have no scaler.

``torch.amp.GradScaler('cpu')`` came with torch 2.3. Before, the only scaler
is CUDA's, which turns itself off without a GPU.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .features import HAS_CPU_SCALER

__all__ = ['CpuGradScaler', 'scaler_for']

# As in torch, where they are members of an enumeration.
_READY, _UNSCALED, _STEPPED = 'ready', 'unscaled', 'stepped'


class CpuGradScaler:
    """Scale losses, unscale gradients and find what is not finite.

    Arguments, methods and rules are those of ``torch.amp.GradScaler``, for
    gradients on a CPU; a test compares both.

    Args:
        init_scale: First loss scale.
        growth_factor: Factor after ``growth_interval`` finite steps in a row.
        backoff_factor: Factor after a step that was not finite.
        growth_interval: Finite steps in a row before a growth.
        enabled: False makes every method do nothing but step.
    """

    def __init__(self, init_scale: float = 2.**16, growth_factor: float = 2.,
                 backoff_factor: float = .5, growth_interval: int = 2000,
                 enabled: bool = True) -> None:
        self._enabled = enabled
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._scale: Tensor | None = None
        self._per_optimizer_states: dict[int, dict[str, Any]] = {}

    def is_enabled(self) -> bool:
        """Tell if the scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the loss scale, 1 where the scaler is off."""
        if not self._enabled:
            return 1.
        return self._init_scale if self._scale is None else (
            float(self._scale))

    def get_growth_factor(self) -> float:
        """Return the factor of a growth."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Take another factor of growths."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Return the factor of a backoff."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Take another factor of backoffs."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """Return the number of finite steps before a growth."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Take another number of finite steps before a growth."""
        self._growth_interval = new_interval

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or lists of losses, by the loss scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._scale = torch.tensor(float(self._init_scale))
            return outputs * self._scale
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        raise ValueError('Expected a tensor or tensors to scale, but got '
                         f'{type(outputs).__name__}')

    def _state(self, optimizer: Any) -> dict[str, Any]:
        return self._per_optimizer_states.setdefault(
            id(optimizer), {'stage': _READY, 'found_inf_per_device': {}})

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        """Look at the gradients without unscaling them."""
        bad = [(~grad.detach().isfinite()).any()
               for grad in _grads(optimizer, halves=True)]
        found = self._state(optimizer)['found_inf_per_device']
        found.clear()
        if bad:
            found[torch.device('cpu')] = torch.stack(bad).any().float()
        return found

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the loss scale; once a step.

        Raises:
            RuntimeError: It was done in this step, or nothing was scaled.
            ValueError: A gradient in half.
        """
        if not self._enabled:
            return
        state = self._state(optimizer)
        if state['stage'] != _READY:
            raise RuntimeError('Expected one call of unscale_() in a step, '
                               f'but the optimizer is {state["stage"]}')
        grads = _grads(optimizer)
        self._check_inf_per_device(optimizer)
        inverse = self._scaled('unscale_').double().reciprocal().float()
        with torch.no_grad():
            for grad in grads:
                grad.mul_(inverse)
        state['stage'] = _UNSCALED

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step where all gradients are finite; they are unscaled first.

        Raises:
            RuntimeError: It was done in this step, or nothing was scaled.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if 'closure' in kwargs:
            raise RuntimeError('Expected no closure: a step that is skipped '
                               'could not take it back')
        self._scaled('step')
        state = self._state(optimizer)
        if state['stage'] == _STEPPED:
            raise RuntimeError('Expected one call of step() for an optimizer '
                               'before update()')
        if state['stage'] == _READY:
            self.unscale_(optimizer)
        state['stage'] = _STEPPED
        state['bad'] = _any(state['found_inf_per_device'])
        return None if state['bad'] else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back off or grow, or take another loss scale.

        Args:
            new_scale: That scale, or None for the rules.

        Raises:
            RuntimeError: No gradients were looked at, or nothing scaled.
        """
        if not self._enabled:
            return
        scale = self._scaled('update')
        states = [state for state in self._per_optimizer_states.values()
                  if state['found_inf_per_device']]
        if new_scale is not None:
            scale.fill_(float(new_scale))
        elif not states:
            raise RuntimeError('Expected gradients to be looked at before '
                               'update()')
        elif any(state['bad'] if 'bad' in state else
                 _any(state['found_inf_per_device']) for state in states):
            scale.fill_(float(scale) * self._backoff_factor)
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                grown = (scale.double() * self._growth_factor).float()
                if grown.isfinite():
                    scale.copy_(grown)
                self._growth_tracker = 0
        self._per_optimizer_states = {}

    def _scaled(self, asked: str) -> Tensor:
        if self._scale is None:
            raise RuntimeError(f'Expected scale() to be called before '
                               f'{asked}()')
        return self._scale

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its rules as plain numbers."""
        return {} if not self._enabled else {
            'scale': self.get_scale(),
            'growth_factor': self._growth_factor,
            'backoff_factor': self._backoff_factor,
            'growth_interval': self._growth_interval,
            '_growth_tracker': self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` has returned.

        Raises:
            RuntimeError: The state of a scaler that was off.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError('Expected the state of a gradient scaler, but '
                               'it is empty, as of one that was off')
        self._init_scale = state_dict['scale']
        if self._scale is not None:
            self._scale.fill_(state_dict['scale'])
        self._growth_factor = state_dict['growth_factor']
        self._backoff_factor = state_dict['backoff_factor']
        self._growth_interval = state_dict['growth_interval']
        self._growth_tracker = state_dict['_growth_tracker']


def _any(found: dict[Any, Tensor]) -> bool:
    return any(bool(flag) for flag in found.values())


def _grads(optimizer: Any, halves: bool = False) -> list[Tensor]:
    """Return what the gradients of an optimizer hold.

    Raises:
        ValueError: A gradient in half, unless these are allowed.
    """
    grads = [parameter.grad for group in optimizer.param_groups
             for parameter in group['params'] if parameter.grad is not None]
    if not halves and any(grad.dtype == torch.float16 for grad in grads):
        raise ValueError('Attempting to unscale FP16 gradients.')
    return [grad._values() if grad.is_sparse else grad for grad in grads]


def scaler_for(device: str, use_fsdp: bool, scale: float) -> Any:
    """Make the gradient scaler of this version of torch.

    Args:
        device: Type of the device of the parameters, ``cuda`` or ``cpu``.
        use_fsdp: Whether the parameters are shards of FSDP.
        scale: First loss scale.

    Raises:
        RuntimeError: Shards on a CPU with an old torch.
    """
    if use_fsdp:
        from torch.distributed.fsdp.sharded_grad_scaler import (
            ShardedGradScaler,
        )
        if device == 'cuda':
            return ShardedGradScaler(init_scale=scale)
        if not HAS_CPU_SCALER:
            raise RuntimeError('FSDP with a loss scale on a CPU needs torch '
                               f'2.3, but this is torch {torch.__version__}')
        return ShardedGradScaler(device, init_scale=scale)
    if HAS_CPU_SCALER:
        return torch.amp.GradScaler(device, init_scale=scale)
    kind = CpuGradScaler if device == 'cpu' else torch.cuda.amp.GradScaler
    return kind(init_scale=scale)
