"""Register CUDA's half precision on a CPU, and take it back.

``torch.autocast('cpu', torch.float16)`` keeps other lists of operations than
CUDA's autocast, and native half convolutions on a CPU are about 30 times
slower than fp32. Here CUDA's lists (:mod:`.kernels`) are
registered on the ``AutocastCPU`` dispatch key, the level at which CUDA's own
autocast works, so that tensor methods, operators and C++ callers are covered
alike.

While they are registered, CUDA's autocast means the CPU's
(:mod:`.autocast_switch`), and mmcv's compiled operations are CUDA's
(:mod:`.mmcv_ops`). Everything is taken back when the last
:func:`cuda_autocast` region is left and the last graph is freed that has to
enter one again (a checkpointed forward, a ``custom_bwd``) or goes back
through one of these operations. The
registration is the process's: until then a CPU autocast region of another
thread has CUDA's lists too. A region object that was made *enabled* on a
machine without a GPU before that has been turned off by torch itself.
"""
from __future__ import annotations

import collections
import contextlib
import threading
import warnings
from typing import Any, Callable, ContextManager, Iterator

import torch

from ..torch_support import (
    AUTOCAST_BY_DEVICE,
    HALVES,
    Patches,
)
from . import autocast_switch, mmcv_ops
from .autocast_switch import STATE
from .casting import CastCache
from .kernels import destroy, half_kernels, stock_only

__all__ = ['cuda_autocast', 'installed', 'is_emulating', 'require']

#: Whether half precision can be emulated on a CPU: torch 2.1 and newer (2.0.1
#: has half kernels for next to nothing, not even a clamp).
HAS_HALF_ON_CPU = hasattr(torch._C, '_ExcludeDispatchKeyGuard')


class _Answer:
    """Answer a question, and keep the registration as long as that lives.

    A checkpointed forward and ``custom_fwd`` remember whether CUDA's
    autocast was on, to enter it again in the backward. The graph that
    holds the answer so holds the registration. Nobody else gets it, but the
    nodes of operations whose backward is ours.
    """

    def __init__(self, value: bool = True) -> None:
        _INSTALLATION.__enter__()
        self._holds = True
        self._value = value

    def __bool__(self) -> bool:
        return self._value

    def __reduce__(self) -> Any:
        # A copy is a plain answer, and holds nothing.
        return bool, (self._value, )

    def __del__(self) -> None:
        # Whoever made it without __init__ acquired nothing.
        if self.__dict__.pop('_holds', False):
            _INSTALLATION.release()


class _Installation:
    """Count regions and graphs; register for the first, undo at the last."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._released: collections.deque[None] = collections.deque()
        self._library: Any | None = None
        self._cache = CastCache()
        self._kernels: dict[str, Callable[..., Any]] = {}
        self._let_through: list[str] = []
        # Below wrappers of the hosts' functions: it is the machine.
        self._patches = Patches('emulation', innermost=True)
        self._scripted = True

    def __enter__(self) -> None:
        require()
        # Imports, the first time: not while the lock is held.
        of_mmcv = mmcv_ops.patches(_Answer)
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._register()
                for patch in (*autocast_switch.patches(
                        _Answer, self._cache.clear), *of_mmcv):
                    self._patches.wrap(*patch)
                if not AUTOCAST_BY_DEVICE:
                    # Scripted code would autocast by torch's own state.
                    self._scripted = torch._C._jit_set_autocast_mode(False)
        self._settle()

    def __exit__(self, *exc: Any) -> None:
        self._released.append(None)
        self._settle(wait=True)

    def release(self) -> None:
        """Leave, from a finalizer: it waits for no lock.

        Whoever has the lock settles it afterwards.
        """
        self._released.append(None)
        self._settle()

    def _settle(self, wait: bool = False) -> None:
        while self._released and self._lock.acquire(blocking=wait):
            try:
                while self._released:
                    self._released.pop()
                    self._count -= 1
                if self._count == 0 and self._library is not None:
                    self._take_back(self._library)
            finally:
                self._lock.release()

    def _take_back(self, library: Any) -> None:
        self._library = None
        self._patches.undo()
        if not AUTOCAST_BY_DEVICE:
            torch._C._jit_set_autocast_mode(self._scripted)
        destroy(library)
        self._cache.clear()

    @property
    def active(self) -> bool:
        """Tell if the lists are registered."""
        return self._count > 0

    def _register(self) -> None:
        if self._kernels:
            self._fill()
            return
        self._kernels = half_kernels(self._cache)
        self._let_through = stock_only(self._kernels)
        # torch warns, once a process, that its own CPU list is overridden,
        # which is what we are here for.
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            self._fill()

    def _fill(self) -> None:
        self._library = torch.library.Library('aten', 'IMPL')
        for name, kernel in self._kernels.items():
            self._library.impl(name, kernel, 'AutocastCPU')
        for name in self._let_through:
            self._library.impl(name, torch.library.fallthrough_kernel,
                               'AutocastCPU')


_INSTALLATION = _Installation()


def installed() -> ContextManager[None]:
    """Keep the registration for a region, without entering autocast.

    Regions may nest.
    """
    return _INSTALLATION


def is_emulating() -> bool:
    """Tell if CUDA's lists are registered in this process."""
    return _INSTALLATION.active


def require() -> None:
    """Raise where this torch cannot emulate half precision.

    Raises:
        RuntimeError: It is torch 2.0.
    """
    if not HAS_HALF_ON_CPU:
        raise RuntimeError('Half precision on a CPU needs torch 2.1, but this '
                           f'is torch {torch.__version__}')


@contextlib.contextmanager
def cuda_autocast(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    """Enter autocast on a CPU with the numerics of CUDA's autocast.

    Tensors carry the dtypes that a GPU would give them. Costs no read from
    the device, and about two milliseconds to register the lists.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        ValueError: Another dtype.
        RuntimeError: On torch 2.0, where it cannot be emulated.

    Example:
        >>> x = torch.full((1, 4), 300.)
        >>> with cuda_autocast():
        ...     torch.nn.functional.linear(x, x).dtype
        torch.float16
    """
    if dtype not in HALVES:
        raise ValueError('Expected argument `dtype` to be torch.float16 or '
                         f'torch.bfloat16, but got {dtype}')
    with _INSTALLATION, torch.autocast('cpu', dtype):
        STATE.regions += 1
        try:
            yield
        finally:
            STATE.regions -= 1
