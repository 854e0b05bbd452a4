"""What several modules need of torch and not every version offers.

Versions in which a name was seen to be there or missing stand beside it.
"""
from typing import Any, Callable, List, Optional

import torch
from torch.utils._pytree import tree_flatten

__all__ = [
    'AUTOCAST_BY_DEVICE', 'HALVES', 'HAS_CPU_SCALER', 'destroy',
    'excluding', 'fallthrough_kernel', 'tree_leaves'
]

HALVES = (torch.float16, torch.bfloat16)

#: Whether autocast takes half on a CPU and asks for its state by device:
#: torch 2.4 and newer (missing in 2.0.1, 2.1.2; there in 2.13).
AUTOCAST_BY_DEVICE = hasattr(torch, 'get_autocast_dtype')

#: Whether torch has a gradient scaler for a CPU: torch 2.3 and newer.
HAS_CPU_SCALER = hasattr(torch.amp, 'GradScaler')


def tree_leaves(tree: Any) -> List[Any]:
    """Flatten lists, tuples and dicts (torch has it from 2.2 on)."""
    return tree_flatten(tree)[0]



def destroy(library: Any) -> None:
    """Take back what a ``torch.library.Library`` has registered.

    The caller drops it: before torch 2.2 the registrations live as long as
    the object does.
    """
    if hasattr(library, '_destroy'):
        library._destroy()


class _Excluding:
    """Region without some dispatch keys, where torch has a guard only."""

    def __init__(self, keys: Any) -> None:
        self._keys = keys
        self._guard: Any = None

    def __enter__(self) -> None:
        self._guard = torch._C.ExcludeDispatchKeyGuard(self._keys)

    def __exit__(self, *exc: Any) -> None:
        self._guard = None


#: Region without some dispatch keys; a guard by another name in torch 2.0.
excluding: Callable[[Any], Any] = getattr(
    torch._C, '_ExcludeDispatchKeyGuard', _Excluding)

#: Kernel that passes on to the next dispatch key; from torch 2.1 on.
fallthrough_kernel: Optional[Callable[..., Any]] = getattr(
    torch.library, 'fallthrough_kernel', None)
