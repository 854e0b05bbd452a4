"""Capture what a model is given and what it makes of it, in one forward."""
from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import nn

from ..torch_support import Patches, not_compiled
from .protocols import CapturedForward, CaughtException
from .state.batch import BatchSnapshot, Rng
from .state.transaction import Transaction

__all__ = ['ForwardCapture']

#: Takes an exception, what was called and how, and the generators then.
Catch = Callable[..., 'CaughtException | None']


class ForwardCapture:
    """Takes in one forward.

    Its hooks are on the model for the length of that forward, so that copies
    of the model never carry them. Costs some ten microseconds an image, and
    no device sync.

    Args:
        transaction: Has just begun.
        copies: Whether the batch is copied, see :class:`.BatchSnapshot`.
        whole_steps: Whether a whole ``train_step`` can be replayed: then
            what the data preprocessor is given is kept, else the arguments
            of the forward.
        catch: Tells if a forward that raises returns a NaN loss instead;
            None where none does.

    Attributes:
        losses: What the model returned.
        caught: What it raised, if that was caught.
        forward: What it began with.
    """

    def __init__(self, transaction: Transaction, copies: bool = False,
                 whole_steps: bool = False, catch: Catch | None = None
                 ) -> None:
        self.losses: Mapping[str, Any] = {}
        self.caught: CaughtException | None = None
        self.forward: CapturedForward | None = None
        self._kept = False
        self._transaction = transaction
        self._rng = transaction.rng
        self._copies = copies
        self._whole_steps = whole_steps
        self._catch = catch
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def over(self, module: nn.Module) -> Iterator[None]:
        """Region of the forward.

        Args:
            module: What is called.
        """
        self.begin(module)
        try:
            yield
        finally:
            self.end()

    def begin(self, module: nn.Module) -> None:
        """Begin to capture what a module does; :meth:`end` must follow."""
        for handle in (module.register_forward_hook(self._take),
                       *self._keeping(module)):
            self._undo.callback(handle.remove)
        if self._catch is not None:
            self._undo.enter_context(Patches('capture')).wrap(
                module, 'forward', functools.partial(
                    functools.partial, self._try, module, self._catch))

    def end(self) -> None:
        """Leave the module as it was."""
        self._undo.close()

    def _take(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Mapping):
            self.losses = output

    def _keep(self, batch: Any, whole_step: bool) -> None:
        if self._kept:
            # A step that prepares several batches: none of them is it all.
            if whole_step:
                self.forward = None
            return
        self._kept = True
        try:
            self.forward = CapturedForward(
                BatchSnapshot(batch, self._copies), self._rng, whole_step)
        except Exception:
            # Whatever a batch is made of: it is evidence, and no more.
            self.forward = None

    def _keeping(self, module: nn.Module) -> list[Any]:
        """Hooks that remember what the model is given, before it looks."""

        @not_compiled
        def keep_data(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._keep(args[0] if args else kwargs.get('data'), True)

        @not_compiled
        def keep_arguments(module: nn.Module, args: Any, kwargs: Any
                           ) -> None:
            self._keep({**dict(enumerate(args)), **kwargs}, False)

        handles = [module.register_forward_pre_hook(
            keep_arguments, with_kwargs=True)]
        first = getattr(module, 'data_preprocessor', None)
        if self._whole_steps and isinstance(first, nn.Module):
            handles.append(first.register_forward_pre_hook(
                keep_data, with_kwargs=True))
        return handles

    def _try(self, module: nn.Module, catch: Catch,
             forward: Callable[..., Any], /, *args: Any, **kwargs: Any
             ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        rng: Rng = self._transaction.rng_now()
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            self.caught = catch(error, module, forward, args, kwargs, rng)
            if self.caught is None:
                raise
            self._transaction.reset()
        device = next((parameter.device for parameter in
                       module.parameters()), torch.device('cpu'))
        return {'loss': torch.full((), math.nan, device=device)}
