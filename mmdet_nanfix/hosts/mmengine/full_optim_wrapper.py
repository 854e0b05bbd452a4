"""Guard ``OptimWrapper``: full precision, without a loss scale."""
from __future__ import annotations

from typing import Any

import torch
from mmengine import dist
from mmengine.registry import OPTIM_WRAPPERS

from ...guard.checks import bad_tensors
from ...guard.rules import LossScale, LossScaleSettings
from .optim_wrapper import GuardedOptimWrapper

__all__ = ['NanSafeOptimWrapper']


@OPTIM_WRAPPERS.register_module()
class NanSafeOptimWrapper(GuardedOptimWrapper):
    """``OptimWrapper`` that survives and explains non-finite numbers.

    For full precision: no autocast and no loss scale. An optimizer step
    whose losses, gradients or buffers are not finite is skipped, taken back
    and recorded per head. The check is one read from the device a step.

    Args:
        nanfix: ``max_consecutive``, the number of skipped steps in a row
            after which training stops (default 20; None for never).
            Those of half precision are accepted too.
        **kwargs: Of ``OptimWrapper``: ``optimizer``,
            ``accumulative_counts``, ``clip_grad``.

    Raises:
        TypeError: An argument of a wrong type, or a setting that does not
            exist.
        ValueError: A value that is impossible.
    """

    def __init__(self, nanfix: dict[str, Any] | None = None,
                 **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.guard_with(nanfix)

    def _scale_of(self, overrides: dict[str, Any]) -> LossScale:
        # Checked all the same: a typing error should not pass.
        LossScaleSettings.from_arguments('dynamic', overrides)
        return LossScale(LossScaleSettings(enabled=False))

    def found_inf(self) -> bool:
        """Check the gradients; one read."""
        found = bool(bad_tensors([
            parameter.grad for group in self.optimizer.param_groups
            for parameter in group['params']]))
        flag = self.guard.flag if self.guard is not None else None
        if flag is None:
            return found
        flag = torch.stack([flag, flag.new_tensor(
            float('nan') if found else 0.)]).sum()
        dist.all_reduce(flag)
        return bool(flag.isnan().item())
