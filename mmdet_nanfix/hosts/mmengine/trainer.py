"""Run steps of a guarded optimizer wrapper again, for replays and retries."""
from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, Callable, ContextManager, Iterable, Iterator, Sequence

import torch
from mmengine import dist
from mmengine.logging import MessageHub
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from ...fp32 import PrecisionControl
from ...guard import (
    CapturedForward,
    PlainTrainer,
    Remedy,
    RetryResult,
    RunConfig,
)
from ...guard.checks import sanitizing
from ...guard.state import Snapshot
from ...torch_support import not_compiled

__all__ = [
    'MMEngineTrainer', 'NotCompiled', 'ProcessGroup', 'ReplayOptimWrapper',
    'together'
]


class ProcessGroup:
    """The :class:`.Ranks` of a run that MMEngine has launched.

    Args:
        alone: Whether it is one process without DDP. DDP in one process
            counts forwards too: one that raised would be missing there.
    """

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        self.rank = dist.get_rank()

    def which(self, flag: bool) -> list[int]:
        """Return the ranks on which a flag is up; a collective."""
        if self.alone:
            return [self.rank] * flag
        device = dist.get_comm_device(None)
        flags = dist.all_gather(torch.tensor(float(flag), device=device))
        return [rank for rank, up in enumerate(flags) if up.item()]

    def share(self, value: Any, source: int) -> Any:
        """Return a plain value of one rank on all; a collective."""
        box = [value]
        if not self.alone:
            dist.broadcast_object_list(box, source)
        return box[0]

    def barrier(self) -> None:
        """Wait for all."""
        dist.barrier()


@contextlib.contextmanager
def together(report: Callable[[Tensor], None],
             say: Callable[[str, int], None]) -> Iterator[None]:
    """Region of a forward whose end all ranks have to reach.

    Args:
        report: Called with a flag where an input was sanitized.
        say: Called with one line and its level where this rank raises.
    """
    try:
        with sanitizing(report):
            yield
    except Exception as error:
        if dist.get_world_size() > 1:
            # The console of other ranks than the first shows errors only.
            say(f'rank {dist.get_rank()} raised {type(error).__name__} in '
                'its forward; the other ranks wait for it and will time out',
                logging.ERROR)
        raise


class ReplayOptimWrapper(OptimWrapper):
    """Stands for a wrapper in a replay: as it is, but for the update.

    Args:
        real: The wrapper.
        on_loss: Called with the loss of the step, unscaled.
        inner_count: Backwards before this one, which tell the length of its
            window.
    """

    def __init__(self, real: Any, on_loss: Callable[..., None],
                 inner_count: int) -> None:
        self.__dict__.update(real.__dict__)
        self.__dict__.pop('step', None)
        self._real = real
        self._on_loss = on_loss
        self._inner_count = inner_count
        self._flags: list[Tensor] = []

    def optim_context(self, model: Any) -> Any:
        """Enter autocast and regions."""
        return self._real.replay_context(self._flags.append)

    def update_params(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Hand over the loss."""
        self.backward(self.scale_loss(loss))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Hand over the loss, NaN where an input was sanitized."""
        for flag in self._flags:
            loss = loss + flag.to(loss.device)
        with self._real.backward_context():
            self._on_loss(loss, **kwargs)

    def step(self, **kwargs: Any) -> None:
        """Move nothing."""

    def zero_grad(self, **kwargs: Any) -> None:
        """Leave gradients to the replay."""


class MMEngineTrainer(PlainTrainer):
    """The :class:`.Trainer` of a guarded optimizer wrapper.

    Args:
        wrapper: The wrapper.
        whole: What the runner trains, DDP included.
        model: The bare model.
        precision: What is computed in fp32.
        ranks: The processes.
        config: What the run was configured with.
    """

    whole_steps = True

    def __init__(self, wrapper: Any, whole: nn.Module, model: nn.Module,
                 precision: PrecisionControl, ranks: ProcessGroup,
                 config: RunConfig) -> None:
        super().__init__(model, ranks)
        self.half = self.can_retry = wrapper.is_half
        self.config = config
        self.untraced = [sys.modules[name] for name in ('mmcv._ext', )
                         if name in sys.modules]
        self._wrapper = wrapper
        self._whole = whole
        self._precision = precision

    def clock(self) -> tuple[int | None, int]:
        """Return epoch, or None, and global iteration, both from 1."""
        info = self._wrapper.message_hub.runtime_info
        epoch = info.get('epoch')
        # Without a runner the backwards count the iterations.
        iteration = info['iter'] + 1 if 'iter' in info else self.position()
        return None if epoch is None else int(epoch) + 1, int(iteration)

    def position(self) -> int:
        """Return the number of backwards so far."""
        return int(self._wrapper.inner_count)

    def remember(self) -> Snapshot:
        """Remember the message hub, which a forward may write to.

        A history is never written to in place, but re-assigned.
        """
        hub: MessageHub = self._wrapper.message_hub
        spaces = [hub.runtime_info, hub.log_scalars,
                  *map(vars, hub.log_scalars.values())]
        return Snapshot([(space, dict(space)) for space in spaces])

    def half_op(self) -> tuple[str | None, int]:
        """Return the half operation that is emulated right now."""
        return self._wrapper.half_op()

    def forward_region(self) -> ContextManager[Any]:
        """Region that a forward runs in."""
        return self._wrapper.replay_context()

    def backward_region(self) -> ContextManager[Any]:
        """Region that a backward runs in."""
        return self._wrapper.backward_context()

    def replay(self, forward: CapturedForward, batch: Any,
               on_loss: Callable[..., None],
               precision: Sequence[str] = ()) -> None:
        """Run the model's own training step, with nothing that steps."""
        with self._precision.with_extra(precision):
            if forward.whole_step:
                self._train_step(self._model, batch, on_loss,
                                 forward.position)
            else:
                super().replay(forward, batch, on_loss)

    def _train_step(self, model: nn.Module, batch: Any,
                    on_loss: Callable[..., None], position: int) -> Any:
        step: Any = type(model)
        # Of the class: an instance may hold a compiled one.
        return step.train_step(model, batch, ReplayOptimWrapper(
            self._wrapper, on_loss, position))

    def retry(self, batches: Iterable[Any], length: int, remedy: Remedy,
              carry: Callable[[Tensor], Tensor]) -> RetryResult:
        """Make a window again, all but the update; two reads."""
        wrapper, model = self._wrapper, self._whole

        def back(loss: Tensor, **kwargs: Any) -> None:
            wrapper.scaled(carry(loss)).backward(**kwargs)

        logged = None
        wrapper.set_scale(remedy.scale)
        with self._precision.with_extra(remedy.fp32):
            for index, batch in enumerate(batches):
                to_come = length - index - 1
                together = to_come > 0 and is_model_wrapper(
                    model) and hasattr(model, 'no_sync')
                with model.no_sync() if together else (
                        contextlib.nullcontext()):
                    logged = self._train_step(
                        model, batch, back, self.position() - to_come - 1)
            if wrapper.found_inf():
                return RetryResult(logged)
            norm = wrapper.gradient_norm()
        return RetryResult(logged, None if norm is None else float(norm))


class NotCompiled:
    """A context manager whose ends are not compiled, but what is between.

    Args:
        context: The context manager.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    @not_compiled
    def __enter__(self) -> Any:
        return self._context.__enter__()

    @not_compiled
    def __exit__(self, *exc: Any) -> Any:
        return self._context.__exit__(*exc)
