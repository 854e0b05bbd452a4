"""A failing forward and its backward, once more.

From the same state, generators and batch, so that on a CPU a replay gives the
same numbers to the last bit. Whatever it changes is taken back.
"""
from __future__ import annotations

import contextlib
import dataclasses
from typing import (
    Any,
    Iterator,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np
import torch
from torch import Tensor, nn

from .batches import KeptBatch
from .finite import FillGauge, bad_tensors, is_finite, norm_of
from .heads import loss_terms
from .host import Host, OnLoss
from .origins import Record
from .provenance import Provenance
from .sites import Site, is_library
from .torch_support import HAS_EAGER_STANCE
from .transaction import Rng, Transaction

__all__ = [
    'Forward', 'Outcome', 'Replays', 'Request', 'can_replay',
    'is_out_of_memory', 'said'
]

Place = Tuple[str, Optional[str]]


def can_replay() -> bool:
    """Whether this torch tells what the probe asks for."""
    return hasattr(torch._C, '_current_autograd_node')


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left."""
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        'out of memory' in str(error))


def said(error: BaseException) -> str:
    """Type and text of an exception, on one line."""
    text = ' '.join(str(error).split())
    return f'{type(error).__name__}: {text}'[:200]


@dataclasses.dataclass
class Forward:
    """What one forward began with.

    Attributes:
        batch: What the model was given.
        rng: The generators.
        whole_step: Whether the batch is that of a ``train_step``, else it
            is the arguments of the forward.
        place: Number of backwards before its own.
    """

    batch: KeptBatch
    rng: Rng
    whole_step: bool
    place: int = 0


@dataclasses.dataclass
class Request:
    """A replay that is asked for: what is changed, what is looked at.

    Attributes:
        batch: In the place of the one that failed, or None for that.
        probe: Whether origins are looked for.
        mended: Name and source of operations whose results are set to 0.
        until: ``raised`` or ``loss``: the way to fail that is asked about;
            what comes after it is not looked at.
        scale: Loss scale, or None for that of the step.
        fp32: What is computed in fp32 beside what the run computes so:
            ``losses``, ``heads``, ``all``, or paths of modules.
            ``bfloat16`` is another dtype of autocast.
        factors: Factors of loss terms by key.
        normalised: Mean and standard deviation of the data preprocessor.
        gauge: Whether it is measured how far gradients fill half's range.
    """

    batch: Any | None = None
    probe: bool = False
    mended: frozenset[Place] = frozenset()
    until: str | None = None
    scale: float | None = None
    fp32: tuple[str, ...] = ()
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    normalised: tuple[list[float], list[float]] | None = None
    gauge: bool = False

    def shared(self) -> dict[str, Any]:
        """What is the same in all processes: no batch, no origins."""
        return {'until': self.until, 'scale': self.scale, 'fp32': self.fp32,
                'factors': dict(self.factors), 'gauge': self.gauge}


@dataclasses.dataclass
class Outcome:
    """What became of a replay.

    Attributes:
        failed: ``loss``, ``grads``, ``buffers`` or ``raised``; None where
            all was finite.
        origins: Where it began, if it was looked for.
        error: Why there is no outcome, in words, or None.
        seen: Of the probe.
        running: Of the probe, where something raised.
        raised: Type of what was raised, if anything was.
        owners: Sites along the graph of each loss, if looked for: the
            nearest first.
        norm: L2 norm of all gradients, unscaled; None where they are bad or
            were not looked at.
        filled: The largest gradient in half on the way, as a share of
            half's largest number, if it was measured.
        losses: Value of each loss key, if origins were looked for.
    """

    failed: str | None = None
    origins: list[Record] = dataclasses.field(default_factory=list)
    error: str | None = None
    seen: int = 0
    running: str | None = None
    raised: str | None = None
    owners: dict[str, list[Site]] = dataclasses.field(default_factory=dict)
    norm: float | None = None
    filled: float | None = None
    losses: dict[str, float] = dataclasses.field(default_factory=dict)


class Replays:
    """Runs forwards again.

    Args:
        model: The bare model.
        transaction: Takes back what a replay changes; closed in between.
        host: Runs them.
    """

    def __init__(self, model: nn.Module, transaction: Transaction,
                 host: Host) -> None:
        self._model = model
        self._transaction = transaction
        self._host = host

    def run(self, forward: Forward, batch: Any, scale: float,
            buffers: Mapping[str, Tensor], probe: Provenance | None = None,
            backward: bool = False, asked: Request | None = None
            ) -> Outcome:
        """Run once and look at what comes out.

        Args:
            forward: What it began with.
            batch: The batch, or another in its place.
            scale: Loss scale of the backward.
            buffers: Those that must stay finite, by name.
            probe: Looks for origins, if given.
            backward: Go back from a loss that is not finite too.
            asked: What else is changed, and what is looked at.

        Returns:
            The outcome; gradients are gone, all else is as before.
        """
        asked = asked or Request()
        run = _Run(self._model, scale, buffers, probe, backward, asked)
        try:
            self._transaction.begin()
            forward.rng.restore()
            run.drop_gradients()
            if asked.normalised is not None:
                self._normalise(*asked.normalised)
            with probe.following(self._host.foreign) if probe else (
                    contextlib.nullcontext()), run.watching(), _eager(), (
                        self._host.precision(asked.fp32)):
                self._call(forward, batch, run.on_loss)
                run.finish()
        except Exception as error:
            run.raised(error)
        finally:
            run.drop_gradients()
            self._transaction.rollback()
        run.outcome.seen = probe.seen if probe is not None else 0
        return run.outcome

    def _normalise(self, mean: list[float], std: list[float]) -> None:
        """Other numbers in the data preprocessor, which are taken back."""
        first: Any = getattr(self._model, 'data_preprocessor', None)
        for name, values in (('mean', mean), ('std', std)):
            held = getattr(first, name)
            held.copy_(held.new_tensor(values).view_as(held))

    def _call(self, forward: Forward, batch: Any, on_loss: OnLoss) -> None:
        host = self._host
        if forward.whole_step and host.train_step is not None:
            host.train_step(batch, on_loss, forward.place)
            return
        args = [batch[key] for key in batch if isinstance(key, int)]
        kwargs = {key: batch[key] for key in batch if isinstance(key, str)}
        with host.forward():
            losses = loss_terms(self._model(*args, **kwargs))
        total = sum(term.mean() for terms in losses.values()
                    for term in terms)
        if isinstance(total, Tensor):
            with host.backward():
                on_loss(total)


class _Run:
    """One replay while it runs."""

    def __init__(self, model: nn.Module, scale: float,
                 buffers: Mapping[str, Tensor], probe: Provenance | None,
                 backward: bool, asked: Request) -> None:
        self.outcome = Outcome()
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

    def _fail(self, what: str, roots: Sequence[Tensor]) -> None:
        if self.outcome.failed is None:
            self.outcome.failed = what
            if self._probe is not None:
                self.outcome.origins = self._probe.origins(roots)

    def on_loss(self, loss: Tensor, **kwargs: Any) -> None:
        """Look at the loss, and go back from it.

        Args:
            loss: Scalar, unscaled.
            **kwargs: Of ``backward``.
        """
        if self._until == 'raised':
            return
        with _unseen():
            if self._probe is not None:
                self._note_losses(self._probe)
            loss = self._weighted(loss)
            if not is_finite(loss):
                self._fail('loss', [loss])
        if not loss.requires_grad or self._until == 'loss' or (
                self.outcome.failed and not self._backward):
            return
        gauge = FillGauge() if self._asked.gauge else None
        with gauge or contextlib.nullcontext():
            (loss * self._scale).backward(**kwargs)
        with _unseen():
            grads = [parameter.grad for parameter in self._model.parameters()
                     if parameter.grad is not None]
            bad = [grads[index] for index in bad_tensors(grads)]
            if bad:
                self._fail('grads', bad)
                return
            norm = norm_of(grads)
            self.outcome.norm = None if norm is None else (
                float(norm) / self._scale)
            self.outcome.filled = gauge.filled if gauge else None

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

    def _note_losses(self, probe: Provenance) -> None:
        self.outcome.owners = {
            key: [site for term in terms for site in _sites_of(term, probe)]
            for key, terms in self._losses.items()}
        self.outcome.losses = {
            key: sum(float(term.detach().float().mean()) for term in terms)
            for key, terms in self._losses.items()}

    def finish(self) -> None:
        """Look at the buffers, where all else is finite."""
        if self._until in ('raised', 'loss'):
            return
        with _unseen():
            buffers = list(self._buffers.values())
            bad = [buffers[index] for index in bad_tensors(buffers)]
            if bad:
                self._fail('buffers', bad)

    def raised(self, error: Exception) -> None:
        """Take in an exception."""
        if is_out_of_memory(error):
            self.outcome.error = 'ran out of memory'
            self.outcome.failed = None
            return
        self.outcome.raised = type(error).__name__
        self.outcome.running = self._probe.running if (
            self._probe is not None) else None
        self._fail('raised', list(self._at_hand(error)))

    def _at_hand(self, error: Exception) -> Iterator[Tensor]:
        """Bad tensors of the innermost frame that has some."""
        frames = []
        trace = error.__traceback__
        while trace is not None:
            if not is_library(trace.tb_frame.f_code.co_filename):
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


def _sites_of(term: Tensor, probe: Provenance) -> Iterator[Site]:
    """Where the operations of a loss were called from, the nearest first."""
    seen = set()
    waiting = [term.grad_fn]
    for _ in range(300):
        if not waiting:
            return
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        site = probe.made_at(node)
        if site is not None:
            yield site
        waiting.extend(parent for parent, _ in node.next_functions)


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
