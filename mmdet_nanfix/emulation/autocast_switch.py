"""Let the name ``cuda`` mean the CPU in torch's autocast.

While the emulation is registered, ``autocast('cuda')`` regions of the hosts
mean the CPU, and questions about CUDA's autocast are answered for it.

Before torch 2.4 the CPU's autocast takes bfloat16 only: it is refused half
where a region is made, and again where it is entered. There torch is left at
bfloat16, and the dtype that a region asks for is kept here, for the kernels
that round to it. Nor are there half kernels for most operations, with
autocast or without. So it stays on in disabled regions, and whether it is on
is kept here too.
"""
from __future__ import annotations

import functools
import threading
from typing import Any, Callable, Iterator, Tuple

import torch
from torch.amp import autocast_mode
from torch.cuda.amp import autocast_mode as cuda_autocast_mode
from torch.utils import checkpoint

from ..torch_support import AUTOCAST_BY_DEVICE, HALVES, not_compiled
from .casting import map_eligible

__all__ = ['STATE', 'autocast_dtype', 'autocast_is_on', 'in_emulation',
           'patches']

#: Where, which name, and how the replacement is made of the original.
_Patch = Tuple[Any, str, Callable[[Any], Any]]

_is_on_cpu = torch.is_autocast_cpu_enabled
_switch_on_cpu = torch.set_autocast_cpu_enabled
# ``custom_fwd`` has moved with torch 2.4.
_FUNCTIONS: Any = autocast_mode if AUTOCAST_BY_DEVICE else cuda_autocast_mode


class _State(threading.local):
    """Keep what torch cannot of this thread's autocast.

    Attributes:
        regions: How many emulated regions it is in.
        depth: How many regions of torch's, enabled or not.
        dtype: Of the CPU's autocast, where torch cannot keep it.
        enabled: Whether it is on, where torch keeps it on in disabled
            regions too.
    """

    regions = 0
    depth = 0
    dtype = torch.bfloat16
    enabled = False


STATE = _State()


def autocast_dtype() -> torch.dtype:
    """Return the dtype of the CPU's autocast in this thread."""
    if AUTOCAST_BY_DEVICE:
        return torch.get_autocast_dtype('cpu')
    return STATE.dtype


def autocast_is_on() -> bool:
    """Tell if autocast is on in this thread, before torch 2.4."""
    return STATE.enabled if STATE.depth else _is_on_cpu()


def in_emulation() -> bool:
    """Tell if what this thread computes stands for a GPU's work.

    In regions with autocast disabled too: which kernel a GPU takes does not
    depend on autocast. So it is where a checkpointed forward runs again.
    """
    return STATE.regions > 0 or STATE.depth > 0


def _gpu_dtype() -> torch.dtype:
    """Return the dtype that CUDA's autocast is taken to have."""
    # Outside of all regions, CUDA's default.
    return autocast_dtype() if STATE.regions else torch.float16


def _keep_dtype(dtype: torch.dtype) -> None:
    STATE.dtype = dtype


def _cpu_region(original: Any) -> Any:

    def __init__(self: Any, device_type: str, dtype: Any = None,  # noqa: N807
                 enabled: Any = True, cache_enabled: Any = None) -> None:
        wanted = dtype
        if device_type == 'cuda':
            # CUDA takes any dtype.
            device_type, wanted = 'cpu', dtype or _gpu_dtype()
        elif device_type != 'cpu' or (dtype or autocast_dtype()) not in HALVES:
            original(self, device_type, dtype, bool(enabled), cache_enabled)
            return
        # The one dtype that every version takes on a CPU.
        original(self, 'cpu', torch.bfloat16, bool(enabled), cache_enabled)
        self.fast_dtype = wanted or autocast_dtype()

    return __init__


def _cpu_enter(original: Any, held: Callable[[], Any]) -> Any:
    """Enter regions that were made before the registration, too."""

    def __enter__(self: Any) -> Any:  # noqa: N807
        # Where torch keeps autocast on in a disabled region, that must not
        # outlive the registration.
        self.__dict__.setdefault('_nanfix_devices', []).append(
            (self.device, None if AUTOCAST_BY_DEVICE else held()))
        if self.device == 'cuda':
            self.device = 'cpu'
        if not STATE.depth and not AUTOCAST_BY_DEVICE:
            # Of a region of torch's own around the registration.
            STATE.enabled = _is_on_cpu()
        STATE.depth += 1
        out = original(self)
        self.prev = bool(self.prev)
        return out

    return __enter__


def _cpu_exit(original: Any) -> Any:

    def __exit__(self: Any, *exc: Any) -> Any:  # noqa: N807
        devices = self.__dict__.get('_nanfix_devices')
        STATE.depth -= bool(devices)
        out = original(self, *exc)
        if devices:
            self.device, _ = devices.pop()
        return out

    return __exit__


def _regions(held: Callable[[], Any]) -> Iterator[_Patch]:
    yield autocast_mode.autocast, '__init__', _cpu_region
    yield autocast_mode.autocast, '__enter__', functools.partial(
        _cpu_enter, held=held)
    yield autocast_mode.autocast, '__exit__', _cpu_exit


class _TorchForFunctions:
    """Stand for ``torch`` in ``custom_fwd``, which remembers answers."""

    def __init__(self, held: Callable[[], Any]) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def is_autocast_enabled(self, *device_type: str) -> Any:
        """Tell if autocast is on, by an answer that may be kept."""
        on = torch.is_autocast_enabled(*device_type)
        return self._held() if on and device_type in ((), ('cuda', )) else on


def _holding(held: Callable[[bool], Any]) -> Callable[[Any], Any]:
    """Give checkpoints answers that hold the registration.

    Where autocast is off too, if torch cannot enter such a region again.
    """

    def make(original: Any) -> Any:

        def _get_autocast_kwargs(*args: Any, **kwargs: Any) -> Any:
            device, cpu = original(*args, **kwargs)
            if cpu['enabled'] or not AUTOCAST_BY_DEVICE:
                cpu['enabled'] = held(bool(cpu['enabled']))
            return device, cpu

        return _get_autocast_kwargs

    return make


def _by_device() -> Iterator[_Patch]:
    """Yield names of torch 2.4 and newer, which take a type of device."""

    def cpu(device_type: str | None) -> str:
        return 'cpu' if device_type in (None, 'cuda') else str(device_type)

    def answer(original: Any) -> Any:
        return lambda device_type=None: original(cpu(device_type))

    def switch(original: Any) -> Any:

        def set_autocast_enabled(device_type: Any, enabled: Any = None
                                 ) -> None:
            if enabled is None:
                # The old form has one argument and means CUDA.
                device_type, enabled = 'cuda', device_type
            original(cpu(device_type), bool(enabled))

        return set_autocast_enabled

    def dtype(original: Any) -> Any:
        return lambda device_type: (
            _gpu_dtype() if device_type == 'cuda' else original(device_type))

    def set_dtype(original: Any) -> Any:
        return lambda device_type, dtype: original(cpu(device_type), dtype)

    def cast(original: Any) -> Any:
        return lambda value, device_type, dtype: original(
            value, cpu(device_type), dtype)

    yield torch, 'is_autocast_enabled', answer
    yield torch, 'set_autocast_enabled', switch
    yield torch, 'get_autocast_dtype', dtype
    yield torch, 'set_autocast_dtype', set_dtype
    yield torch, 'get_autocast_gpu_dtype', lambda original: _gpu_dtype
    yield _FUNCTIONS, '_cast', cast


def _by_name() -> Iterator[_Patch]:
    """Yield names of older versions, which are about one device each."""

    def cast(original: Any) -> Any:

        def _cast(value: Any, dtype: torch.dtype) -> Any:
            return map_eligible(lambda tensor: tensor.to(dtype), value)

        return _cast

    def switch(original: Any) -> Any:

        def set_autocast_enabled(enabled: Any) -> None:
            STATE.enabled = bool(enabled)
            _switch_on_cpu(STATE.enabled or STATE.depth > 0)

        return set_autocast_enabled

    yield torch, 'is_autocast_enabled', lambda original: autocast_is_on
    yield torch, 'is_autocast_cpu_enabled', lambda original: autocast_is_on
    yield torch, 'set_autocast_enabled', switch
    yield torch, 'set_autocast_cpu_enabled', switch
    yield torch, 'get_autocast_gpu_dtype', lambda original: _gpu_dtype
    yield torch, 'set_autocast_gpu_dtype', lambda original: _keep_dtype
    yield torch, 'get_autocast_cpu_dtype', lambda original: autocast_dtype
    yield torch, 'set_autocast_cpu_dtype', lambda original: _keep_dtype
    yield _FUNCTIONS, '_cast', cast


def _not_compiled(make: Callable[[Any], Any], original: Any) -> Any:
    return not_compiled(make(original))


def patches(held: Callable[..., Any], clear: Callable[[], None]
            ) -> Iterator[_Patch]:
    """Yield what is replaced in torch while the emulation is registered.

    Args:
        held: Makes an answer that may be kept, true or as its argument says:
            a checkpointed forward and ``custom_fwd`` remember whether
            autocast was on.
        clear: Called where autocast forgets its half copies of weights.
    """

    def clearing(original: Any) -> Any:

        def clear_autocast_cache() -> None:
            clear()
            original()

        return clear_autocast_cache

    yield from _regions(held)
    if AUTOCAST_BY_DEVICE:
        yield from _by_device()
    else:
        # Whose dynamo takes the answers for constants.
        for place, name, make in _by_name():
            yield place, name, functools.partial(_not_compiled, make)
    yield _FUNCTIONS, 'torch', lambda original: _TorchForFunctions(held)
    yield torch, 'clear_autocast_cache', clearing
    yield checkpoint, '_get_autocast_kwargs', _holding(held)
