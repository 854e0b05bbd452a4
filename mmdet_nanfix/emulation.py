"""Half precision on a CPU, with the numerics of CUDA autocast.

``torch.autocast('cpu', torch.float16)`` keeps other lists of operations than
CUDA's autocast, and native half convolutions on a CPU are about 30 times
slower than fp32. Here CUDA's lists (:mod:`~mmdet_nanfix.half_ops`) are
registered on the ``AutocastCPU`` dispatch key, the level at which CUDA's own
autocast works, so that tensor methods, operators and C++ callers are covered
alike.

While they are registered, ``autocast('cuda')`` regions of the hosts mean the
CPU, and questions about CUDA's autocast are answered for it. Everything is
taken back when the last :func:`cuda_autocast` region is left and the last
graph is freed that has to enter one again (a checkpointed forward, a
``custom_bwd``). The registration is the process's: until then a CPU autocast
region of another thread has CUDA's lists too. A region object that was made
*enabled* on a machine without a GPU before that has been turned off by torch
itself.
"""
import contextlib
import threading
import warnings
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Optional,
)

import torch
from torch.amp import autocast_mode
from torch.utils import checkpoint

from .half_ops import CastCache, half_kernels, stock_only

__all__ = ['cuda_autocast', 'installed', 'is_emulating']

_HALVES = (torch.float16, torch.bfloat16)


class _Yes:
    """A true answer that keeps the registration while it is remembered.

    A checkpointed forward and ``custom_fwd`` remember whether CUDA's
    autocast was on, to enter it again in the backward. The graph that
    holds the answer so holds the registration. Nobody else gets it.
    """

    def __init__(self) -> None:
        _INSTALLATION.__enter__()
        self._holds = True

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        # A copy is a plain answer, and holds nothing.
        return bool, (True, )

    def __del__(self) -> None:
        # Whoever made it without __init__ acquired nothing.
        if self.__dict__.pop('_holds', False):
            _INSTALLATION.__exit__()


class _TorchForFunctions:
    """``torch`` as ``custom_fwd`` sees it: it remembers what it is told."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def is_autocast_enabled(self, device_type: str = 'cuda') -> Any:
        """Whether autocast is on, as an answer that may be kept."""
        on = torch.is_autocast_enabled(device_type)
        return _Yes() if on and device_type == 'cuda' else on


class _Installation:
    """The registration and the patches, counted so that they may nest."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._library: Optional[Any] = None
        self._cache = CastCache()
        self._kernels: Dict[str, Callable[..., Any]] = {}
        self._let_through: List[str] = []
        self._originals: Dict[Any, Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._register()
                self._patch()

    def __exit__(self, *exc: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._library is not None:
                self._library._destroy()
                self._library = None
                self._cache.clear()
                for (place, name), original in self._originals.items():
                    setattr(place, name, original)
                self._originals.clear()

    @property
    def active(self) -> bool:
        """Whether the lists are registered."""
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

    def _replace(self, place: Any, name: str,
                 make: Callable[[Any], Any]) -> None:
        original = place.__dict__[name]
        self._originals[place, name] = original
        setattr(place, name, make(original))

    def _patch(self) -> None:
        """Let the name ``cuda`` mean the CPU in all that concerns autocast."""
        self._replace(autocast_mode.autocast, '__init__', _cpu_region)
        self._replace(autocast_mode.autocast, '__enter__', _cpu_enter)
        self._replace(autocast_mode.autocast, '__exit__', _cpu_exit)
        self._replace(autocast_mode, '_cast', _cpu_cast)
        self._replace(autocast_mode, 'torch',
                      lambda original: _TorchForFunctions())
        self._replace(torch, 'is_autocast_enabled', _cpu_answer)
        self._replace(torch, 'set_autocast_enabled', _cpu_switch)
        self._replace(torch, 'get_autocast_dtype', _cpu_dtype)
        self._replace(torch, 'set_autocast_dtype', _cpu_set_dtype)
        self._replace(torch, 'get_autocast_gpu_dtype', lambda original: (
            lambda: torch.get_autocast_dtype('cuda')))
        self._replace(torch, 'clear_autocast_cache', self._clearing)
        self._replace(checkpoint, '_get_autocast_kwargs', _holding)

    def _clearing(self, original: Any) -> Any:

        def clear_autocast_cache() -> None:
            self._cache.clear()
            original()

        return clear_autocast_cache


def _cpu_region(original: Any) -> Any:

    def __init__(self: Any, device_type: str, dtype: Any = None,  # noqa: N807
                 enabled: Any = True, cache_enabled: Any = None) -> None:
        own_dtype = None
        if device_type == 'cuda':
            dtype = dtype or torch.get_autocast_dtype('cuda')
            device_type = 'cpu'
            if dtype not in _HALVES:
                # CUDA takes any dtype, the CPU's regions take two.
                own_dtype, dtype = dtype, torch.float16
        original(self, device_type, dtype, bool(enabled), cache_enabled)
        self.fast_dtype = own_dtype or self.fast_dtype

    return __init__


def _cpu_enter(original: Any) -> Any:
    """Regions that were made before the registration count too."""

    def __enter__(self: Any) -> Any:  # noqa: N807
        self.__dict__.setdefault('_nanfix_devices', []).append(self.device)
        if self.device == 'cuda':
            self.device = 'cpu'
        out = original(self)
        self.prev = bool(self.prev)
        return out

    return __enter__


def _cpu_exit(original: Any) -> Any:

    def __exit__(self: Any, *exc: Any) -> Any:  # noqa: N807
        out = original(self, *exc)
        devices = self.__dict__.get('_nanfix_devices')
        if devices:
            self.device = devices.pop()
        return out

    return __exit__


def _cpu_cast(original: Any) -> Any:

    def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original(value, 'cpu' if device_type == 'cuda' else
                        device_type, dtype)

    return _cast


def _cpu_answer(original: Any) -> Any:

    def is_autocast_enabled(device_type: Optional[str] = None) -> Any:
        return original('cpu' if device_type in (None, 'cuda')
                        else device_type)

    return is_autocast_enabled


def _cpu_switch(original: Any) -> Any:

    def set_autocast_enabled(device_type: Any, enabled: Any = None) -> None:
        if enabled is None:
            # The old form has one argument and means CUDA.
            device_type, enabled = 'cuda', device_type
        original('cpu' if device_type == 'cuda' else device_type,
                 bool(enabled))

    return set_autocast_enabled


def _cpu_set_dtype(original: Any) -> Any:

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        original('cpu' if device_type == 'cuda' else device_type, dtype)

    return set_autocast_dtype


def _holding(original: Any) -> Any:

    def _get_autocast_kwargs(*args: Any, **kwargs: Any) -> Any:
        device, cpu = original(*args, **kwargs)
        if cpu['enabled']:
            cpu['enabled'] = _Yes()
        return device, cpu

    return _get_autocast_kwargs


def _cpu_dtype(original: Any) -> Any:

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        if device_type != 'cuda':
            return original(device_type)
        # Outside of all regions, CUDA's default.
        return original('cpu') if _DEPTH.regions else torch.float16

    return get_autocast_dtype


class _Depth(threading.local):
    """How many emulated regions this thread is in."""

    regions = 0


_DEPTH = _Depth()
_INSTALLATION = _Installation()


def installed() -> ContextManager[None]:
    """Keep the registration for a region, without entering autocast.

    Regions may nest.
    """
    return _INSTALLATION


def is_emulating() -> bool:
    """Whether what runs here stands for a GPU.

    True in regions with autocast disabled too: which kernel a GPU takes does
    not depend on autocast.
    """
    return _INSTALLATION.active


@contextlib.contextmanager
def cuda_autocast(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    """Autocast on a CPU with the numerics of CUDA's autocast.

    Tensors carry the dtypes that a GPU would give them. Costs no read from
    the device, and about two milliseconds to register the lists.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        ValueError: Another dtype.

    Example:
        >>> x = torch.full((1, 4), 300.)
        >>> with cuda_autocast():
        ...     torch.nn.functional.linear(x, x).dtype
        torch.float16
    """
    if dtype not in _HALVES:
        raise ValueError('Expected argument `dtype` to be torch.float16 or '
                         f'torch.bfloat16, but got {dtype}')
    _DEPTH.regions += 1
    try:
        with _INSTALLATION, torch.autocast('cpu', dtype):
            yield
    finally:
        _DEPTH.regions -= 1
