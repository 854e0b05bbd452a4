"""mmcv's compiled operations with half inputs on a CPU.

mmcv's CUDA RoIAlign takes half features, its CPU kernel refuses them. Under
:mod:`~mmdet_nanfix.emulation` it is computed in fp32 and handed back in
half. NMS needs nothing: like the CUDA kernel, the CPU kernel takes half
scores (it only sorts them) and refuses half boxes.
"""
import functools
from typing import Any, Callable, Dict, Tuple

import torch
from mmcv.utils import ext_loader
from torch import Tensor

__all__ = ['accept_half']

# Operation: places of the arguments that it writes to.
WRITES: Dict[str, Tuple[int, ...]] = {
    'roi_align_forward': (2, 3, 4),
    'roi_align_backward': (4, ),
}


def _is_half(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.dtype == torch.float16
            and value.device.type == 'cpu')


def _widened(op: Callable[..., Any],
             writes: Tuple[int, ...]) -> Callable[..., Any]:

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_half, args)):
            return op(*args, **kwargs)
        wide = [value.float() if _is_half(value) else value
                for value in args]
        out = op(*wide, **kwargs)
        for place in writes:
            if wide[place] is not args[place]:
                args[place].copy_(wide[place])
        return out

    call.accepts_half = True  # type: ignore[attr-defined]
    return call


def accept_half() -> None:
    """Let the operations above take half CPU tensors, which raise today.

    Calls without a half CPU tensor go through unchanged. Doing it twice
    does nothing more.

    Raises:
        ImportError: mmcv was installed without its operations.
    """
    module = ext_loader.load_ext('_ext', list(WRITES))
    for name, writes in WRITES.items():
        op = getattr(module, name)
        if not getattr(op, 'accepts_half', False):
            setattr(module, name, _widened(op, writes))
