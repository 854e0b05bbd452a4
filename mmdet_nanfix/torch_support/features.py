"""Tell what this torch can do, and stand in for what it lacks.

Versions in which a name was seen to be there or missing stand beside it.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, Sequence, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

__all__ = [
    'AUTOCAST_BY_DEVICE', 'HALVES', 'HAS_CPU_SCALER', 'HAS_EAGER_STANCE',
    'HAS_SEQUENCE_NR', 'foreach_copy_',
    'not_compiled', 'tree_leaves'
]

_Function = TypeVar('_Function', bound=Callable[..., Any])

HALVES = (torch.float16, torch.bfloat16)

#: Whether autocast takes half on a CPU and asks for its state by device:
#: torch 2.4 and newer (missing in 2.0.1, 2.1.2; there in 2.13).
AUTOCAST_BY_DEVICE = hasattr(torch, 'get_autocast_dtype')

#: Whether compiled code can be told to run as it is written: torch 2.6 and
#: newer (missing in 2.1.2).
HAS_EAGER_STANCE = hasattr(getattr(torch, 'compiler', None), 'set_stance')

#: Whether autograd's nodes tell the order of their operations: torch 2.1 and
#: newer (missing in 2.0.1).
HAS_SEQUENCE_NR = hasattr(torch._C._autograd, '_get_sequence_nr')

#: Whether torch has a gradient scaler for a CPU: torch 2.3 and newer.
HAS_CPU_SCALER = hasattr(torch.amp, 'GradScaler')


def tree_leaves(tree: Any) -> list[Any]:
    """Flatten lists, tuples and dicts (torch has it from 2.2 on)."""
    return tree_flatten(tree)[0]


def foreach_copy_(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors, in one call from torch 2.1 on (missing in 2.0.1)."""
    if hasattr(torch, '_foreach_copy_'):
        torch._foreach_copy_(into, tensors)
        return
    for own, tensor in zip(into, tensors):
        own.copy_(tensor)


def not_compiled(function: _Function) -> _Function:
    """Keep ``torch.compile`` out of a function and of what it calls.

    From torch 2.6 on torch is asked when it is first called: the compiler
    takes a second to import. (2.1.2 compiles the wrapper that asks.)
    """
    # ``functools.wraps`` copies these from what is wrapped, which torch would
    # take instead of the wrapper (seen in 2.1.2).
    for copied in ('_torchdynamo_orig_callable', 'get_compiler_config'):
        vars(function).pop(copied, None)
    if not HAS_EAGER_STANCE:
        return _disabled(function)  # type: ignore[return-value]
    kept_out: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kept_out:
            kept_out.append(_disabled(function))
        return kept_out[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As torch has it; by another name before 2.1."""
    if hasattr(torch, 'compiler'):
        return torch.compiler.disable(function)
    from torch import _dynamo
    return _dynamo.disable(function)

