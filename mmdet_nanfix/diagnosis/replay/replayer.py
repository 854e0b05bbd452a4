"""Run a failing forward and its backward once more.

From the same state, generators and batch, so that on a CPU a replay gives the
same numbers to the last bit. Whatever it changes is undone.
"""
from __future__ import annotations

import contextlib
import itertools
import math
import types
from typing import Any, ContextManager, Iterator, Mapping, Protocol, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...guard import CapturedForward, StepParts
from ...guard.checks import (
    bad_tensors,
    can_be_checked,
    is_finite,
    loss_terms,
    nodes_of,
    norm_of,
)
from ...torch_support import HALVES, HAS_EAGER_STANCE, tree_leaves
from ..findings import Failure, ReplayResult
from .call_site import is_library
from .op_record import CallSite, OpRecord
from .request import ReplayRequest, is_out_of_memory

__all__ = ['FillGauge', 'Probe', 'Replayer']


# Of the graph of a loss, the nearest to it.
_MANY_NODES = 300


class Probe(Protocol):
    """What a replay needs of :class:`.NonFiniteTracer`."""

    seen: int
    running: str | None

    def following(self, modules: Sequence[types.ModuleType]
                  ) -> ContextManager[None]:
        """Region in which operations are followed."""

    def of(self, tensor: Tensor) -> list[OpRecord]:
        """Return what made a tensor non-finite."""

    def origins(self, tensors: Sequence[Tensor]) -> list[OpRecord]:
        """Return the origins that reached any of the tensors."""

    def made_at(self, node: Any) -> CallSite | None:
        """Return where the operation of a node was called from."""


class Replayer:
    """Runs forwards again.

    Args:
        parts: Of the guarded step; its transaction is closed in between.
    """

    def __init__(self, parts: StepParts) -> None:
        self._model = parts.model
        self._transaction = parts.transaction
        self._trainer = parts.trainer
        self._buffers = parts.buffers

    def run(self, forward: CapturedForward, batch: Any, scale: float,
            probe: Probe | None = None, backward: bool = False,
            asked: ReplayRequest | None = None) -> ReplayResult:
        """Run once and look at what comes out.

        Args:
            forward: What it began with.
            batch: The batch, or another in its place.
            scale: Loss scale of the backward.
            probe: Looks for origins, if given.
            backward: Go back from a loss that is not finite too.
            asked: What else is changed, and what is looked at.

        Returns:
            The result; gradients are gone, all else is as before.
        """
        asked = asked or ReplayRequest()
        run = _Run(self._model, scale, self._buffers.watched(), probe,
                   backward, asked)
        try:
            self._transaction.begin()
            forward.rng.restore()
            run.drop_gradients()
            if asked.normalised is not None:
                self._normalise(*asked.normalised)
            with probe.following(self._trainer.untraced) if probe else (
                    contextlib.nullcontext()), run.watching(), _eager():
                self._trainer.replay(forward, batch, run.on_loss,
                                     asked.precision)
                run.finish()
        except Exception as error:
            run.raised(error)
        finally:
            run.drop_gradients()
            self._transaction.rollback()
        run.result.seen = probe.seen if probe is not None else 0
        return run.result

    def _normalise(self, mean: list[float], std: list[float]) -> None:
        """Other numbers in the data preprocessor, which are taken back."""
        first: Any = getattr(self._model, 'data_preprocessor', None)
        for name, values in (('mean', mean), ('std', std)):
            held = getattr(first, name)
            held.copy_(held.new_tensor(values).view_as(held))


class _Run:
    """One replay while it runs."""

    def __init__(self, model: nn.Module, scale: float,
                 buffers: Mapping[str, Tensor], probe: Probe | None,
                 backward: bool, asked: ReplayRequest) -> None:
        self.result = ReplayResult()
        self._model = model
        self._scale = scale
        self._buffers = buffers
        self._probe = probe
        self._backward = backward
        self._until = asked.until
        self._asked = asked
        self._losses: dict[str, list[Tensor]] = {}

    def drop_gradients(self) -> None:
        """Nothing is added to the gradients of a step that failed."""
        for parameter in self._model.parameters():
            parameter.grad = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See the losses that the model returns."""

        def take(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Mapping):
                self._losses = loss_terms(output)

        handle = self._model.register_forward_hook(take)
        try:
            yield
        finally:
            handle.remove()

    def _fail(self, what: Failure, roots: Sequence[Tensor]) -> None:
        if self.result.failed is None:
            self.result.failed = what
            if self._probe is not None:
                self.result.origins = self._probe.origins(roots)

    def on_loss(self, loss: Tensor, **kwargs: Any) -> None:
        """Look at the loss, and go back from it.

        Args:
            loss: Scalar, unscaled.
            **kwargs: Of ``backward``.
        """
        if self._until == Failure.RAISED:
            return
        with _unseen():
            if self._probe is not None:
                self._note_losses(self._probe)
            loss = self._weighted(loss)
            if not is_finite(loss):
                self._fail(Failure.LOSS, [loss])
        if not loss.requires_grad or self._until == Failure.LOSS or (
                self.result.failed and not self._backward):
            return
        gauge = FillGauge() if self._asked.gauge else None
        with gauge or contextlib.nullcontext():
            (loss * self._scale).backward(**kwargs)
        with _unseen():
            grads = [parameter.grad for parameter in self._model.parameters()
                     if parameter.grad is not None]
            bad = [grads[index] for index in bad_tensors(grads)]
            if bad:
                self._fail(Failure.GRADS, bad)
                return
            norm = norm_of(grads)
            self.result.norm = None if norm is None else (
                float(norm) / self._scale)
            self.result.filled = gauge.filled if gauge else None

    def _weighted(self, loss: Tensor) -> Tensor:
        """The loss with other weights of some of its terms."""
        if not self._asked.factors:
            return loss
        total = sum(term.detach().mean() for terms in self._losses.values()
                    for term in terms)
        # A window divides it.
        share = loss.detach() / total if total != 0 else 1.
        for key, factor in self._asked.factors.items():
            for term in self._losses.get(key, ()):
                loss = loss - (1 - factor) * share * term.mean()
        return loss

    def _note_losses(self, probe: Probe) -> None:
        self.result.owners = {
            key: [site for term in terms
                  for node in itertools.islice(nodes_of(term), _MANY_NODES)
                  for site in [probe.made_at(node)] if site is not None]
            for key, terms in self._losses.items()}
        self.result.losses = {
            key: sum(float(term.detach().float().mean()) for term in terms)
            for key, terms in self._losses.items()}

    def finish(self) -> None:
        """Look at the buffers, where all else is finite."""
        if self._until in (Failure.RAISED, Failure.LOSS):
            return
        with _unseen():
            buffers = list(self._buffers.values())
            bad = [buffers[index] for index in bad_tensors(buffers)]
            if bad:
                self._fail(Failure.BUFFERS, bad)

    def raised(self, error: Exception) -> None:
        """Take in an exception."""
        if is_out_of_memory(error):
            self.result.error = 'ran out of memory'
            self.result.failed = None
            return
        self.result.raised = type(error).__name__
        self.result.running = self._probe.running if (
            self._probe is not None) else None
        self._fail(Failure.RAISED, list(self._at_hand(error)))

    def _at_hand(self, error: Exception) -> Iterator[Tensor]:
        """Bad tensors of the innermost frame that has some."""
        frames = []
        trace = error.__traceback__
        while trace is not None:
            if not is_library(trace.tb_frame):
                frames.append(trace.tb_frame)
            trace = trace.tb_next
        for frame in reversed(frames if self._probe is not None else []):
            found = [tensor for tensor in _tensors(frame.f_locals)
                     if self._is_bad(tensor)]
            if found:
                yield from found
                return

    def _is_bad(self, tensor: Tensor) -> bool:
        records = self._probe.of(tensor) if self._probe is not None else []
        return any(not record.meant for record in records)


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Tensors below some variables, and those that arrays are views of."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, (nn.Module, str, np.ndarray)):
        return
    elif isinstance(value, dict):
        for item in list(value.values())[:200]:
            yield from _tensors(item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value[:200]:
            yield from _tensors(item, depth - 1)
    elif hasattr(value, '__dict__') and not callable(value):
        yield from _tensors(dict(value.__dict__), depth - 1)


def _unseen() -> Any:
    """What runs within is not part of the replay."""
    return torch.utils._python_dispatch._disable_current_modes()


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled parts run as they are written."""
    with torch.compiler.set_stance('force_eager') if HAS_EAGER_STANCE else (
            contextlib.nullcontext()):
        yield


class FillGauge(TorchDispatchMode):
    """Region of a backward in which the largest half number is noted.

    That of gradients: what a checkpointed forward computes again, with
    gradients enabled, is none. Two calls an operation with a half result.

    Attributes:
        filled: That number as a share of the largest of its dtype; one read
            for each device. 0 where nothing was in half.
    """

    def __init__(self) -> None:
        super().__init__()
        self._largest: dict[Any, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any,
                           args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in () if torch.is_grad_enabled() else tree_leaves(out):
            if isinstance(value, Tensor) and value.dtype in (
                    HALVES) and can_be_checked(value):
                place = value.dtype, value.device
                largest = torch.linalg.vector_norm(value.detach(), math.inf)
                known = self._largest.get(place)
                self._largest[place] = largest if known is None else (
                    torch.maximum(largest, known))
        return out

    @property
    def filled(self) -> float:
        """See the class."""
        return max((float(value) / torch.finfo(dtype).max for (
            dtype, _), value in self._largest.items()), default=0.)
