"""What stands for an optimizer wrapper while a step is made once more."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import Tensor

__all__ = ['Retries', 'StandIn']


class StandIn(OptimWrapper):
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
        self._taints: list[Tensor] = []

    def optim_context(self, model: Any) -> Any:
        """Autocast and regions."""
        return self._real._replayed(self._taints.append)

    def update_params(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Hand over the loss."""
        self.backward(self.scale_loss(loss))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Hand over the loss, NaN where something was mended on the way."""
        for flag in self._taints:
            loss = loss + flag.to(loss.device)
        with self._real._switched():
            self._on_loss(loss, **kwargs)

    def step(self, **kwargs: Any) -> None:
        """Nothing moves."""

    def zero_grad(self, **kwargs: Any) -> None:
        """Gradients are the replay's."""


class Retries:
    """Makes steps of a guarded wrapper again, see :class:`.replay.Retries`.

    Args:
        wrapper: The wrapper.
        model: What the runner trains, DDP included.
    """

    def __init__(self, wrapper: Any, model: Any) -> None:
        self._wrapper = wrapper
        self._model = model

    @contextlib.contextmanager
    def at(self, scale: float | None, fp32: Sequence[str]
           ) -> Iterator[None]:
        """Region of a retry, at another loss scale and precision."""
        wrapper = self._wrapper
        wrapper._rescale(wrapper._scale.scale if scale is None else scale)
        with wrapper._precision_control.with_extra(fp32):
            yield

    def run(self, batch: Any, to_come: int,
            carry: Callable[[Tensor], Tensor]) -> Any:
        """Run the whole step of a batch, but for the update."""
        wrapper, model = self._wrapper, self._model

        def back(loss: Tensor, **kwargs: Any) -> None:
            wrapper._scaled(carry(loss)).backward(**kwargs)

        together = to_come > 0 and is_model_wrapper(model) and hasattr(
            model, 'no_sync')
        with model.no_sync() if together else contextlib.nullcontext():
            # Of the class: an instance may hold a compiled one.
            return type(model).train_step(model, batch, StandIn(
                wrapper, back, wrapper._inner_count - to_come - 1))

    def found_inf(self) -> bool:
        """Result of the check of the gradients, which are unscaled then."""
        return bool(self._wrapper._found_inf())

    def norm(self) -> float | None:
        """Their L2 norm, unscaled."""
        norm = self._wrapper._gradient_norm()
        return None if norm is None else float(norm)
