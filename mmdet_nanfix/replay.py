"""A failing forward and its backward, once more.

From the same state, generators and batch, so that on a CPU a replay gives the
same numbers to the last bit. Whatever it changes is taken back.
"""
import contextlib
import dataclasses
import types
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
)

import numpy as np
import torch
from torch import Tensor, nn

from .batches import KeptBatch
from .finite import bad_tensors, is_finite
from .heads import loss_terms
from .origins import Record
from .provenance import Provenance
from .sites import Site, is_library
from .transaction import Rng, Transaction

__all__ = [
    'Forward', 'Host', 'Outcome', 'Replays', 'can_replay',
    'is_out_of_memory', 'said'
]

OnLoss = Callable[..., None]


def can_replay() -> bool:
    """Whether this torch tells what the probe asks for."""
    return hasattr(torch._C, '_current_autograd_node') and hasattr(
        torch._C._autograd, '_get_sequence_nr')


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
    """

    batch: KeptBatch
    rng: Rng
    whole_step: bool


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
    """

    failed: Optional[str] = None
    origins: List[Record] = dataclasses.field(default_factory=list)
    error: Optional[str] = None
    seen: int = 0
    running: Optional[str] = None
    raised: Optional[str] = None
    owners: Dict[str, List[Site]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Host:
    """What a replay needs of whoever runs the training.

    Attributes:
        train_step: Runs the model's own step on a batch, without an
            optimizer, and hands over the loss; None where there is none.
        forward: Region that a forward runs in.
        backward: Region that a backward runs in.
        foreign: Modules of compiled functions that torch does not dispatch.
    """

    train_step: Optional[Callable[[Any, OnLoss], None]] = None
    forward: Callable[[], ContextManager[Any]] = contextlib.nullcontext
    backward: Callable[[], ContextManager[Any]] = contextlib.nullcontext
    foreign: Sequence[types.ModuleType] = ()


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
            buffers: Mapping[str, Tensor], probe: Optional[Provenance] = None,
            backward: bool = False, until: Optional[str] = None) -> Outcome:
        """Run once and look at what comes out.

        Args:
            forward: What it began with.
            batch: The batch, or another in its place.
            scale: Loss scale of the backward.
            buffers: Those that must stay finite, by name.
            probe: Looks for origins, if given.
            backward: Go back from a loss that is not finite too.
            until: ``raised`` or ``loss``: nothing after that is looked at.

        Returns:
            The outcome; gradients are gone, all else is as before.
        """
        run = _Run(self._model, scale, buffers, probe, backward, until)
        try:
            self._transaction.begin()
            forward.rng.restore()
            run.drop_gradients()
            with probe.following(self._host.foreign) if probe else (
                    contextlib.nullcontext()), run.watching(), _eager():
                self._call(forward, batch, run.on_loss)
                run.finish()
        except Exception as error:
            run.raised(error)
        finally:
            run.drop_gradients()
            self._transaction.rollback()
        run.outcome.seen = probe.seen if probe is not None else 0
        return run.outcome

    def _call(self, forward: Forward, batch: Any, on_loss: OnLoss) -> None:
        host = self._host
        if forward.whole_step and host.train_step is not None:
            host.train_step(batch, on_loss)
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
                 buffers: Mapping[str, Tensor], probe: Optional[Provenance],
                 backward: bool, until: Optional[str]) -> None:
        self.outcome = Outcome()
        self._model = model
        self._scale = scale
        self._buffers = buffers
        self._probe = probe
        self._backward = backward
        self._until = until
        self._losses: Dict[str, List[Tensor]] = {}

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
                self.outcome.owners = {
                    key: [site for term in terms
                          for site in _sites_of(term, self._probe)]
                    for key, terms in self._losses.items()}
            if not is_finite(loss):
                self._fail('loss', [loss])
        if not loss.requires_grad or self._until == 'loss' or (
                self.outcome.failed and not self._backward):
            return
        (loss * self._scale).backward(**kwargs)
        with _unseen():
            grads = [parameter.grad for parameter in self._model.parameters()
                     if parameter.grad is not None]
            bad = [grads[index] for index in bad_tensors(grads)]
            if bad:
                self._fail('grads', bad)

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
    stance = getattr(torch.compiler, 'set_stance', None)
    with stance('force_eager') if stance else contextlib.nullcontext():
        yield
