"""What guarded optimizer wrappers of MMEngine have in common.

:class:`Guarded` translates between MMEngine's wrapper protocol and
:class:`~mmdet_nanfix.step.GuardedStep`.
"""
from __future__ import annotations

import contextlib
import logging
import sys
from typing import (
    Any,
    Callable,
    Iterator,
)

import torch
from mmengine import dist
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from . import raisers
from .arguments import device_of, split_settings
from .fp32 import PrecisionControl
from .host import Configured, Host
from .incidents import NonFiniteError
from .journal import Journal, say, warn
from .model_kinds import has_compiled_parts, is_sharded, segfaults
from .picture import Picture, Undo
from .policy import LossScale, StopRule
from .standin import Retries, StandIn
from .step import GuardedStep, Verdict
from .sticky import StickyParts
from .torch_support import HAS_EAGER_STANCE, not_compiled

__all__ = ['Guarded']


class _NotCompiled:
    """A context manager whose ends are not compiled, but what is between."""

    def __init__(self, context: Any) -> None:
        self._context = context

    @not_compiled
    def __enter__(self) -> Any:
        return self._context.__enter__()

    @not_compiled
    def __exit__(self, *exc: Any) -> Any:
        return self._context.__exit__(*exc)


def _ranks_with(flag: bool) -> list[int]:
    """Ranks on which a flag is up; a collective, after failures."""
    device = dist.get_comm_device(None)
    flags = dist.all_gather(torch.tensor(float(flag), device=device))
    return [rank for rank, up in enumerate(flags) if up.item()]


def _shared(value: Any, source: int) -> Any:
    """A plain value of one rank, on all; a collective, after failures."""
    box = [value]
    dist.broadcast_object_list(box, source)
    return box[0]


class Guarded(OptimWrapper):
    """What both wrappers have in common: a guard around each step.

    A healthy step costs no read from the device beyond :meth:`_found_inf`,
    or one more where the backward of a NaN would end the process.
    """

    _guard: GuardedStep | None = None
    _whole: nn.Module | None = None
    _loaded: dict[str, Any] = {}
    _stock = False
    #: What a config says; a hook tells.
    configured = Configured()
    _look_first = False
    _alone = True

    _nanfix: dict[str, Any] = {}
    _fp32: str | None = None
    _max_incidents: int | None = None
    _precision_control: PrecisionControl | None = None

    def guard_with(self, nanfix: dict[str, Any] | None) -> None:
        """Begin to guard, with settings that win over those it has."""
        if self._stock:
            return
        split_settings(nanfix)
        self._nanfix = {**self._nanfix, **(nanfix or {})}
        settings = split_settings(self._nanfix)
        self._fp32 = settings.fp32
        self._max_incidents = settings.max_incidents
        self._scale = self._scale_of(settings.scale)
        self._stop = StopRule(**settings.stop)
        self._sticky = StickyParts(settings.fp32_modules)
        self._journal = Journal(self._stop)
        #: Whether the last optimizer step was skipped.
        self.skipped = False
        #: What a rescued step has returned for the log, or None.
        self.logged: Any = None

    def _scale_of(self, overrides: dict[str, Any]) -> LossScale:
        """The loss scale with these settings."""
        raise NotImplementedError

    def initialize_count_status(self, model: nn.Module, init_counts: int,
                                max_counts: int) -> None:
        """Arm the guard; the runner calls this right before training."""
        super().initialize_count_status(model, init_counts, max_counts)
        self._guard = None
        if self._stock:
            warn(f'devices of type {device_of(self.optimizer)!r} are not '
                 'guarded: the optimizer wrapper behaves as the stock class')
            return
        self._arm(model)

    def _arm(self, model: nn.Module) -> GuardedStep:
        if self._guard is not None:
            return self._guard
        self._whole = model
        sharded = is_sharded(model)
        model = model.module if is_model_wrapper(model) else model
        # DDP in one process counts forwards too: one that raised would be
        # missing in its books.
        alone = dist.get_world_size() == 1 and model is self._whole
        self._look_first = alone and segfaults(model) and (
            device_of(self.optimizer) == 'cpu')
        self._alone = alone
        control = self._precision_control = PrecisionControl(
            model, self._regions(), device_of(self.optimizer),
            self._sticky.given, lambda: self._sticky.names)
        self._forget_parts()
        half = self._is_half()
        host = Host(
            self._train_again, self._replayed, self._switched,
            [sys.modules[name] for name in ('mmcv._ext', )
             if name in sys.modules], control.with_extra, half,
            self._regions(), lambda: self._inner_count,
            Retries(self, self._whole) if half else None, self.configured,
            None if alone else _shared)
        self._guard = GuardedStep(
            model, self.optimizer, self._scale, self._stop, self._clock,
            rank=dist.get_rank(), agree=None if alone else _ranks_with,
            others=[self._hub_undo], sharded=sharded, host=host,
            max_incidents=self._max_incidents, sticky=self._sticky)
        self._guard.history.load_state_dict(self._loaded)
        if not alone:
            raisers.install()
        self._journal.open()
        if self._scale.note:
            say(self._scale.note)
        say(self._settings_line())
        if has_compiled_parts(model) and not HAS_EAGER_STANCE:
            say(f'torch {torch.__version__} cannot run compiled parts of a '
                'model as they are written (2.6 can): where something begins '
                'in them, a line of the compiled code is named; in emulated '
                'half before 2.4 they keep the dtype that they began with')
        if self._guard.buffers.exempt:
            names = sorted(self._guard.buffers.exempt)
            say(f'{len(names)} buffers hold non-finite numbers from the '
                f'start and are not watched: {", ".join(names[:3])}'
                + (', ...' if len(names) > 3 else ''))
        return self._guard

    def _forget_parts(self) -> None:
        """Drop what stays in fp32 by a checkpoint of another model."""
        control = self._precision_control
        lost = self._sticky.forget(control.known) if control else []
        if lost:
            warn(f'the checkpoint has {", ".join(lost)} in fp32, which this '
                 'model does not have: not any more')

    @contextlib.contextmanager
    def _replayed(self, taint: Callable[[Tensor], None] = lambda flag: None
                  ) -> Iterator[None]:
        """What a forward runs in, without the guard around it.

        Args:
            taint: Called where something was mended on the way.
        """
        with self._autocast(), self._switched(), (
                contextlib.nullcontext() if self._alone
                else raisers.tainting(taint)):
            yield

    def _train_again(self, batch: Any, on_loss: Callable[..., None],
                     place: int) -> None:
        """The model's own training step, with nothing in it that steps."""
        model: Any = self._guard.model if self._guard else None
        # Of the class: an instance may hold a compiled one.
        type(model).train_step(model, batch, StandIn(self, on_loss, place))

    def _hub_undo(self) -> Callable[[], Undo]:
        """Take back what a forward writes to the message hub.

        A history is never written to in place, but re-assigned.
        """
        hub = self.message_hub
        spaces = [hub.runtime_info, hub.log_scalars,
                  *map(vars, hub.log_scalars.values())]
        before = Picture([(space, dict(space)) for space in spaces])

        def ended() -> Undo:
            return before.changes().take_back

        return ended

    def _clock(self) -> tuple[int | None, int]:
        """Epoch and global iteration, both from 1."""
        info = self.message_hub.runtime_info
        epoch = info.get('epoch')
        # Without a runner the backwards count the iterations.
        iteration = info['iter'] + 1 if 'iter' in info else self._inner_count
        return None if epoch is None else int(epoch) + 1, int(iteration)

    def _settings_line(self) -> str:
        mode = self._regions()
        fp32 = f', fp32 in {mode}' if mode else ''
        return (f'guarding {self._precision()} training{fp32}; '
                f'{self._scale}; stop '
                f'after {self._stop.max_consecutive} skipped steps in a row; '
                f'incidents go to {self._journal.path or "the console only"}')

    def _precision(self) -> str:
        return 'full-precision'

    def optim_context(self, model: nn.Module) -> Any:
        """Watch the losses of one forward, in autocast where there is one."""
        return _NotCompiled(self._context(model))

    @contextlib.contextmanager
    def _context(self, model: nn.Module) -> Iterator[None]:
        if self._stock:
            with super().optim_context(model):
                yield
            return
        guard = self._arm(model)
        bare = model.module if is_model_wrapper(model) else model
        with OptimWrapper.optim_context(self, model), guard.watch(bare), (
                self._autocast()), self._switched(), self._together(guard):
            yield

    @contextlib.contextmanager
    def _together(self, guard: GuardedStep) -> Iterator[None]:
        """What several ranks need so that all reach the end of a forward."""
        if self._alone:
            yield
            return
        try:
            with raisers.tainting(guard.taint):
                yield
        except Exception as error:
            if dist.get_world_size() == 1:
                raise
            # The console of other ranks than the first shows errors only.
            say(f'rank {dist.get_rank()} raised {type(error).__name__} in '
                'its forward; the other ranks wait for it and will time out',
                logging.ERROR)
            raise

    def _is_half(self) -> bool:
        """Whether autocast computes in half precision."""
        return False

    def _autocast(self) -> Any:
        return contextlib.nullcontext()

    def _regions(self) -> str | None:
        """Which regions run in fp32; None where all is fp32 anyway."""
        return self._fp32 if self._is_half() else None

    @property
    def _more(self) -> tuple[str, ...]:
        """What is in fp32 beside the regions, during a replay."""
        return self._precision_control.extra if self._precision_control else ()

    def _switched(self) -> Any:
        """Regions and parts in fp32."""
        control = self._precision_control
        return control.active() if control else contextlib.nullcontext()

    @not_compiled
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward of the loss with its anchor term."""
        if self._stock or self._guard is None:
            super().backward(loss, **kwargs)
            return
        guarded = self._guard.attach(loss)
        if guarded is not None and self._look_first and (
                self._guard.loss_is_bad()):
            self._guard.give_up()
            guarded = None
        if guarded is None:
            self._inner_count += 1
        else:
            with self._switched():
                super().backward(guarded, **kwargs)
        if not self.should_update():
            self._guard.settle()

    @not_compiled
    def step(self, **kwargs: Any) -> None:
        """Step, or skip, take back and record; then update the loss scale.

        Raises:
            NonFiniteError: Too many steps were skipped.
        """
        if self._stock:
            super().step(**kwargs)
            return
        guard = self._guard
        self.skipped = (guard is not None and guard.must_skip) or (
            self._found_inf())
        self.logged = None
        norm = None if self.skipped else self._clip_and_apply(**kwargs)
        before = self._scale.scale
        verdict = guard.judge(self.skipped, norm) if guard else (
            self._judge_unarmed(self.skipped))
        if verdict.rescued:
            self.skipped, self.logged = False, verdict.logged
            self._clip_and_apply(**kwargs)
        self._rescale(self._scale.scale)
        iteration = self._clock()[1]
        if self._scale.scale != before:
            self._journal.draw('scale', self._scale.scale, iteration)
        if verdict.incident is not None:
            self._journal.tell(verdict.incident)
        if verdict.note is not None:
            warn(verdict.note)
        if verdict.stop is not None or (
                self._inner_count == self._max_counts):
            self.close()
        if verdict.stop is not None:
            raise NonFiniteError(
                self._journal.stop_message(verdict.stop, self._save()),
                verdict.incident)

    def _found_inf(self) -> bool:
        """Result of the check of the gradients; the one read of a step."""
        raise NotImplementedError

    def _clip_and_apply(self, **kwargs: Any) -> Any:
        """Step; returns the norm of the unscaled gradients, or None."""
        norm = None
        if self.clip_grad_kwargs:
            by_norm = getattr(self, 'grad_name', '') == 'grad_norm' and (
                self.clip_grad_kwargs.get('norm_type', 2) == 2)
            norm = None if by_norm else self._norm_if_due()
            self._clip_grad()
            if by_norm:
                # Clipping has measured and read it.
                known = self.message_hub.log_scalars.get('train/grad_norm')
                norm = known.current() if known is not None else None
        else:
            norm = self._norm_if_due()
        self._apply(**kwargs)
        return norm

    def _norm_if_due(self) -> Tensor | None:
        guard = self._guard
        return self._gradient_norm() if (
            guard is not None and guard.history.is_due) else None

    def _gradient_norm(self) -> Tensor | None:
        """L2 norm of the gradients, unscaled; no device sync."""
        guard = self._guard
        if guard is None or guard.sharded:
            return None
        return guard.history.measure()

    def _scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale."""
        return loss

    def _apply(self, **kwargs: Any) -> None:
        self.optimizer.step(**kwargs)

    def _rescale(self, scale: float) -> None:
        """Take over the loss scale of the next step."""

    def _judge_unarmed(self, found_inf: bool) -> Verdict:
        """Without a model there is no evidence; scale and skip still work."""
        self._scale.update(losses_finite=True, grads_finite=not found_inf)
        return Verdict(stop=self._stop.update(skipped=found_inf))

    def _save(self) -> str:
        if self._guard is None or self._whole is None:
            return 'No weights were saved, since no model is known.'
        whole = self._whole
        model = whole if is_sharded(whole) else self._guard.model
        epoch, iteration = self._clock()
        return self._journal.save_weights(model, epoch, iteration,
                                          self.state_dict())

    @property
    def window_open(self) -> bool:
        """Whether gradients of earlier iterations wait for their step."""
        return self._guard is not None and self._guard.window_open

    @property
    def exempt(self) -> list[str]:
        """Buffers that hold infinities on purpose, by name."""
        return sorted(self._guard.buffers.exempt) if self._guard else []

    def close(self) -> None:
        """Print the table at the end, once."""
        if not self._stock:
            self._journal.close(self._scale.scale)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and, as plain numbers, scale and counters."""
        if self._stock:
            return super().state_dict()
        state = OptimWrapper.state_dict(self)
        state['loss_scaler'] = {
            **self._scale.state_dict(), **self._stop.state_dict(),
            **self._sticky.state_dict(),
            **(self._guard.history.state_dict() if self._guard else {
                key: value for key, value in self._loaded.items()
                if key == 'nanfix_grad_norm'})}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of a guarded or of a stock wrapper."""
        if self._stock:
            super().load_state_dict(state_dict)
            return
        stored = state_dict.pop('loss_scaler', {})
        self._stop.load_state_dict(stored)
        self._sticky.load_state_dict(stored)
        self._forget_parts()
        self._loaded = stored
        if self._guard is not None:
            self._guard.history.load_state_dict(stored)
        complaint = self._scale.load_state_dict(stored)
        if complaint:
            warn(complaint)
        self._reload()
        OptimWrapper.load_state_dict(self, state_dict)

    def _reload(self) -> None:
        """Take over the loss scale of a checkpoint."""
