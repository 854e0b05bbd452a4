"""Guard MMEngine's optimizer wrappers: what both of them have in common.

:class:`GuardedOptimWrapper` translates between MMEngine's wrapper protocol
and :class:`.GuardedStep`.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from typing import Any, Callable, Iterator, Mapping, Optional

from mmengine import dist
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from ...fp32 import PrecisionControl
from ...guard import GuardedStep, RunConfig, Verdict
from ...guard.checks import install_sanitizers, sanitizing
from ...guard.rules import ErrorBoundary, Fp32Promotions, LossScale, StopRule
from ...incidents import NonFiniteError
from ...torch_support import not_compiled
from .model_kinds import has_compiled_parts, is_sharded, segfaults
from .reporter import IncidentReporter, say, warn
from .settings import Settings, device_of, split_settings
from .trainer import MMEngineTrainer, NotCompiled, ProcessGroup, together

__all__ = ['GuardedOptimWrapper']

#: Takes a flag where an input was sanitized; None: nobody is told.
Report = Optional[Callable[[Tensor], None]]

class GuardedOptimWrapper(OptimWrapper):
    """What both wrappers have in common: a guard around each step.

    A healthy step costs no read from the device beyond :meth:`found_inf`,
    or one more where the backward of a NaN would end the process.

    Attributes:
        config: What the config says, as far as a hook has told.
        settings: Of the wrapper, or of a hook.
        skipped: Whether the last optimizer step was skipped.
        logged: What a rescued step has returned for the log, or None.
        scale_rules, stop_rule, promotions: Rules, and what they have counted.
        reporter: Tells of incidents.
        precision: What is computed in fp32 right now.
        guard, trainer: Of the model, once that is known; guard is None before.
    """

    config: RunConfig
    settings: Settings
    _given: Mapping[str, Any] = types.MappingProxyType({})
    _loaded: Mapping[str, Any] = types.MappingProxyType({})
    guard: GuardedStep | None = None
    _whole: nn.Module | None = None
    _look_first = False
    _alone = True

    def guard_with(self, nanfix: dict[str, Any] | None) -> None:
        """Begin to guard, with settings that win over those it has.

        Raises:
            TypeError: A setting that does not exist, or of a wrong type.
            ValueError: A value that is impossible.
        """
        split_settings(nanfix)
        self.config = vars(self).get('config') or RunConfig()
        self._given = {**self._given, **(nanfix or {})}
        settings = self.settings = split_settings(dict(self._given))
        self.scale_rules = self._scale_of(settings.scale)
        self.stop_rule = StopRule(**settings.stop)
        self.promotions = Fp32Promotions(settings.fp32_modules)
        self.reporter = IncidentReporter(self.stop_rule)
        self.precision = PrecisionControl(nn.Module(), None, 'cpu')
        self.skipped = False
        self.logged: Any = None

    def _scale_of(self, overrides: dict[str, Any]) -> LossScale:
        """The loss scale with these settings."""
        raise NotImplementedError

    def initialize_count_status(self, model: nn.Module, init_counts: int,
                                max_counts: int) -> None:
        """Arm the guard; the runner calls this right before training."""
        super().initialize_count_status(model, init_counts, max_counts)
        self.guard = None
        self.arm(model)

    def arm(self, model: nn.Module) -> GuardedStep:
        """Build the guard around a model, once.

        Args:
            model: What is trained, DDP included.
        """
        if self.guard is not None:
            return self.guard
        from ...diagnosis import diagnostician
        self._whole = model
        sharded = is_sharded(model)
        bare = model.module if is_model_wrapper(model) else model
        alone = dist.get_world_size() == 1 and bare is model
        device = device_of(self.optimizer)
        self._look_first = alone and segfaults(bare) and device == 'cpu'
        self._alone = alone
        self.precision = PrecisionControl(
            bare, self._regions(), device, self.promotions.given)
        self._drop_unknown()
        self.trainer = MMEngineTrainer(
            self, model, bare, self.precision, ProcessGroup(alone),
            dataclasses.replace(self.config, fp32=self._regions()))
        self.guard = GuardedStep(
            bare, self.optimizer, self.scale_rules, self.stop_rule,
            self.trainer, functools.partial(
                diagnostician, max_incidents=self.settings.max_incidents),
            sharded=sharded, promotions=self.promotions)
        self.guard.history.load_state_dict(self._loaded)
        if not alone:
            install_sanitizers(self.guard)
        self.reporter.open()
        self.reporter.announce(
            self._precision(), self._regions(), self.scale_rules,
            sorted(self.guard.buffers.exempt), has_compiled_parts(bare))
        return self.guard

    def _drop_unknown(self) -> None:
        """Drop what stays in fp32 by a checkpoint of another model."""
        lost = self.promotions.drop_unknown(self.precision.known) if (
            self.guard or self._whole) else []
        if lost:
            warn(f'the checkpoint has {", ".join(lost)} in fp32, which this '
                 'model does not have: not any more')
        self.precision.promoted = tuple(self.promotions.names)

    @contextlib.contextmanager
    def replay_context(self, report: Report = None) -> Iterator[None]:
        """Enter what a forward runs in, without the guard around it."""
        with self._autocast(), self.backward_context(report):
            yield

    @contextlib.contextmanager
    def backward_context(self, report: Report = None) -> Iterator[None]:
        """Enter what a backward runs in: a checkpoint computes again there.

        What that sanitizes was reported in its forward.
        """
        with self.precision.active(), (
                contextlib.nullcontext() if self._alone
                else sanitizing(report)):
            yield

    def _precision(self) -> str:
        return 'full-precision'

    def optim_context(self, model: nn.Module) -> Any:
        """Watch the losses of one forward, in autocast where there is one."""
        return NotCompiled(self._context(model))

    @contextlib.contextmanager
    def _context(self, model: nn.Module) -> Iterator[None]:
        guard = self.arm(model)
        bare = model.module if is_model_wrapper(model) else model
        with OptimWrapper.optim_context(self, model), guard.capture(bare), (
                self._autocast()), self.precision.active(), (
                    contextlib.nullcontext() if self._alone
                    else together(guard.flag_step, say)):
            yield

    @property
    def is_half(self) -> bool:
        """Whether autocast computes in half precision."""
        return False

    def half_op(self) -> tuple[str | None, int]:
        """Return the half operation that is emulated right now, or None."""
        return None, 0

    def _autocast(self) -> Any:
        return contextlib.nullcontext()

    def _regions(self) -> str | None:
        """Which regions run in fp32; None where all is fp32 anyway."""
        return self.settings.fp32 if self.is_half else None

    @not_compiled
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward of the loss with its anchor term."""
        if self.guard is None:
            super().backward(loss, **kwargs)
            return
        guarded = self.guard.attach(loss)
        if guarded is not None and self._look_first and (
                self.guard.loss_is_bad()):
            self.guard.give_up()
            guarded = None
        if guarded is None:
            self._inner_count += 1
        else:
            with self.backward_context():
                super().backward(guarded, **kwargs)
        if not self.should_update():
            self.guard.settle()

    @not_compiled
    def step(self, **kwargs: Any) -> None:
        """Step, or skip, take back and record; then update the loss scale.

        Raises:
            NonFiniteError: Too many steps were skipped.
        """
        guard = self.guard
        self.skipped = (guard is not None and guard.must_skip) or (
            self.found_inf())
        self.logged = None
        norm = None if self.skipped else self._clip_and_apply(**kwargs)
        before = self.scale_rules.scale
        verdict = guard.judge(self.skipped, norm) if guard else (
            self._judge_unarmed())
        if verdict.rescued:
            self.skipped, self.logged = False, verdict.logged
            self._clip_and_apply(**kwargs)
        self.set_scale()
        if guard is not None and self.scale_rules.scale != before:
            self.reporter.add_scalar('scale', self.scale_rules.scale,
                                      self.trainer.clock()[1])
        if verdict.incident is not None:
            with ErrorBoundary() as boundary:
                self.reporter.report(verdict.incident)
            if boundary.error is not None:
                warn(f'an incident could not be told of ({boundary.error})')
            self.precision.promoted = tuple(self.promotions.names)
        if verdict.note is not None:
            warn(verdict.note)
        if verdict.stop is not None or (
                self._inner_count == self._max_counts):
            self.close()
        if verdict.stop is not None:
            raise NonFiniteError(
                self.reporter.stop_message(verdict.stop, self._save()),
                verdict.incident)

    def found_inf(self) -> bool:
        """Result of the check of the gradients; the one read of a step."""
        raise NotImplementedError

    def _clip_and_apply(self, **kwargs: Any) -> Any:
        """Step; returns the norm of the unscaled gradients, or None."""
        by_norm = self.clip_grad_kwargs and getattr(
            self, 'grad_name', '') == 'grad_norm' and (
                self.clip_grad_kwargs.get('norm_type', 2) == 2)
        due = self.guard is not None and self.guard.history.is_due
        norm: Any = self.gradient_norm() if due and not by_norm else None
        if self.clip_grad_kwargs:
            self._clip_grad()
        if by_norm:
            # Clipping has measured and read it.
            known = self.message_hub.log_scalars.get('train/grad_norm')
            norm = known.current() if known is not None else None
        self._apply(**kwargs)
        return norm

    def gradient_norm(self) -> Tensor | None:
        """L2 norm of the gradients, unscaled; no device sync."""
        guard = self.guard
        if guard is None or guard.sharded:
            return None
        return guard.history.measure()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale."""
        return loss

    def _apply(self, **kwargs: Any) -> None:
        self.optimizer.step(**kwargs)

    def set_scale(self, scale: float | None = None) -> None:
        """Scale by a loss scale from now on; None for that of the rules."""

    def _judge_unarmed(self) -> Verdict:
        """Without a model there is no evidence; scale and skip still work."""
        self.scale_rules.update(losses_finite=True,
                                grads_finite=not self.skipped)
        return Verdict(stop=self.stop_rule.update(skipped=self.skipped))

    def _save(self) -> str:
        if self.guard is None or self._whole is None:
            return 'No weights were saved, since no model is known.'
        return self.reporter.save_weights(
            self._whole if self.guard.sharded else self.guard.model,
            *self.trainer.clock(), self.state_dict())

    @property
    def window_open(self) -> bool:
        """Whether gradients of earlier iterations wait for their step."""
        return self.guard is not None and self.guard.window_open

    def close(self) -> None:
        """Print the table at the end, once."""
        self.reporter.close(self.scale_rules.scale)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and, as plain numbers, scale and counters."""
        state = OptimWrapper.state_dict(self)
        state['loss_scaler'] = {
            **self.scale_rules.state_dict(), **self.stop_rule.state_dict(),
            **self.promotions.state_dict(),
            **(self.guard.history.state_dict() if self.guard else {
                key: value for key, value in self._loaded.items()
                if key == 'nanfix_grad_norm'})}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of a guarded or of a stock wrapper."""
        stored = state_dict.pop('loss_scaler', {})
        self.stop_rule.load_state_dict(stored)
        self.promotions.load_state_dict(stored)
        self._drop_unknown()
        self._loaded = stored
        if self.guard is not None:
            self.guard.history.load_state_dict(stored)
        complaint = self.scale_rules.load_state_dict(stored)
        if complaint:
            warn(complaint)
        self._reload()
        OptimWrapper.load_state_dict(self, state_dict)

    def _reload(self) -> None:
        """Take over the loss scale of a checkpoint."""
