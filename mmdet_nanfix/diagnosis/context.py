"""Say what a run was like when a step failed."""
from __future__ import annotations

import dataclasses
import math
from typing import Callable

from torch import nn

from ..guard import StepParts
from .cause.config_patch import Place

__all__ = ['RunContext']


@dataclasses.dataclass
class RunContext:
    """What a run was like when a step failed.

    Attributes:
        half: Whether it is in half precision.
        fp32: Which regions it computes in fp32.
        scale: The loss scale of the step.
        start: The loss scale that the run started with.
        lowest: The lowest that the loss scale may be.
        backoff: Factor from one scale to the next lower.
        sane: Tells if an unscaled gradient norm is one to step on; None
            where there was none before to compare it with.
        usual_loss: Gives a loss in the steps before, by key, or None.
        norm: Usual gradient norm of the last accepted steps, or None.
        rate: Learning rate.
        safe_rate: One whose step is a hundredth of the weights, or None.
        eps: The smallest of the optimizer, or None.
        normaliser: The model's data preprocessor, or None.
        alone: Whether this is the only process.
        together: Else, whether all can make the same replay at more
            precision.
        can_retry: Whether a step can be made again at once.
        clips_anew: Whether a ``clip_grad`` cannot be merged with that of the
            config.
        by_hook: Whether settings are those of the hook.
        place: Gives for the path of a module its place in the config, and
            what must stand there besides; or None.
    """

    half: bool = False
    fp32: str | None = None
    scale: float = 1.
    start: float = 1.
    lowest: float = 1.
    backoff: float = 0.5
    sane: Callable[[float], bool | None] = lambda norm: None
    usual_loss: Callable[[str], float | None] = lambda key: None
    norm: float | None = None
    rate: float = math.nan
    safe_rate: float | None = None
    eps: float | None = None
    normaliser: nn.Module | None = None
    alone: bool = True
    together: bool = False
    can_retry: bool = False
    clips_anew: bool = False
    by_hook: bool = False
    place: Callable[[str], Place | None] = lambda name: (name, {})

    @classmethod
    def of(cls, parts: StepParts, together: bool, can_retry: bool,
           place: Callable[[str], Place | None]) -> RunContext:
        """Read it off a guarded step; reads from the device.

        Args:
            parts: Of the step.
            together: See the class, like the others.
            can_retry: Likewise.
            place: Likewise.
        """
        rules, history = parts.scale.settings, parts.history
        scale, config = parts.scale.scale, parts.trainer.config
        eps = [float(group['eps']) for group in parts.optimizer.param_groups
               if isinstance(group.get('eps'), (int, float))]
        return cls(
            half=parts.trainer.half, fp32=config.fp32, scale=scale,
            start=rules.start()[0],
            lowest=min(rules.min_scale, scale) if rules.enabled else scale,
            backoff=rules.backoff_factor, sane=history.sane,
            usual_loss=history.usual_loss, norm=history.usual,
            rate=history.learning_rate, safe_rate=history.safe_rate(),
            eps=min(eps, default=None),
            normaliser=getattr(parts.model, 'data_preprocessor', None),
            alone=parts.trainer.ranks.alone, together=together,
            can_retry=can_retry, clips_anew=config.clips_anew,
            by_hook=config.by_hook, place=place)

    @property
    def can_widen(self) -> bool:
        """Whether the same batch can be replayed at more precision."""
        return self.alone or self.together

    def fitting(self, filled: float) -> float:
        """Return the highest scale, in steps of the backoff, that fits half.

        Gradients are proportional to the scale: what fills a share of half's
        range at one scale fills it in proportion at another.

        Args:
            filled: That share at the lowest scale.
        """
        scale = self.scale
        while scale > self.lowest:
            scale *= self.backoff
            if filled * scale / self.lowest < 1:
                break
        return max(scale, self.lowest)
