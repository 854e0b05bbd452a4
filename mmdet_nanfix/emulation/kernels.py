"""Make kernels for a CPU of CUDA autocast's lists of operations.

Each kernel is what the header of the lists (:mod:`.op_lists`)
says of its list, with one difference: an operation that a GPU
runs on half tensor cores is computed as they do it, inputs rounded to half,
products summed in fp32, the result rounded to half. Autograd rounds the
gradients at the same casts. An operation made of several products (a chain
of matrices, a recurrent cell) is rounded once, at its end.

What is on none of CUDA's lists but on one of the CPU's own autocast is let
through, and runs in the dtype that it is given. The CPU's half kernels
compute in fp32 and round once, like CUDA's, but for sums that they gather
step by step (``index_add``, ``index_put`` with accumulation, and their like),
which stop growing where a step is below half a unit in the last place.

Before torch 2.4 the CPU has no half kernels for most of these operations. A
region with autocast disabled keeps ours in use there, which compute in fp32
and round then.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, List, Tuple

import torch
from torch import Tensor

from ..torch_support import AUTOCAST_BY_DEVICE, HALVES, not_compiled
from . import op_lists
from .autocast_switch import autocast_dtype, autocast_is_on
from .casting import CastCache, as_one, dtypes_of, eligible, map_eligible

__all__ = ['destroy', 'half_kernels', 'stock_only']


def _below_autocast() -> Any:
    """Enter a region whose operations autocast has no say in."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

Kernel = Callable[..., Any]
Lists = List[Tuple[Iterable[str], Callable[[Kernel], Kernel]]]

_single = functools.partial(map_eligible, Tensor.float)


def _to(dtype: torch.dtype, out: Any) -> Any:
    """Round the eligible tensors among results."""
    return map_eligible(lambda tensor: tensor.to(dtype), out)


def _lower(op: Kernel, cache: CastCache) -> Kernel:
    name = _packet(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = autocast_dtype()
        with _below_autocast():
            seen: list[bool] = []

            def rounded(tensor: Tensor) -> Tensor:
                seen.append(True)
                return cache.cast(tensor, dtype)

            args, kwargs = map_eligible(rounded, (args, kwargs))
            with as_one(name):
                args, kwargs = _single((args, kwargs))
                out = op(*args, **kwargs)
                return _to(dtype, out) if seen else out

    return kernel


def _fp32(op: Kernel) -> Kernel:

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            args, kwargs = _single((args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _fp32_output(op: Kernel) -> Kernel:
    named = op if AUTOCAST_BY_DEVICE else _fp32_inside(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            if eligible(args[0]) and kwargs.get('dtype') is None:
                dtype_at = _positional_dtype(op)
                if dtype_at is not None and len(args) > dtype_at:
                    if args[dtype_at] is not None:
                        return named(*args, **kwargs)
                    args = args[:dtype_at]
                kwargs['dtype'] = torch.float32
                if not AUTOCAST_BY_DEVICE:
                    # Its backward is in the dtype of the input.
                    args = (args[0].float(), *args[1:])
            return named(*args, **kwargs)

    return kernel


@functools.lru_cache(maxsize=None)
def _positional_dtype(op: Any) -> int | None:
    """Return the index of ``dtype`` where it may be passed by position."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == 'dtype' and not argument.kwarg_only:
            return index
    return None


def _fp32_append(op: Kernel) -> Kernel:
    with_dtype = _overload(op_lists.FP32_APPEND[_name(op)])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            if not eligible(args[0]):
                return op(*args, **kwargs)
            args = (*args, *(() if len(args) > 1 else (2,)))
            if _name(op) == 'norm.ScalarOpt_dim' and len(args) < 4:
                args = (*args, False)
            return with_dtype(*args, **kwargs, dtype=torch.float32)

    return kernel


def _promote(op: Kernel) -> Kernel:
    # These gather in half on a GPU too, step by step.
    inside = op if AUTOCAST_BY_DEVICE or _packet(op) in (
        'index_put', 'scatter_add') else _fp32_inside(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            dtypes = dtypes_of(args, kwargs)
            if not dtypes <= {torch.float32, autocast_dtype()}:
                raise RuntimeError(
                    'Expected floating inputs to be fp32 or '
                    f'{autocast_dtype()} under CUDA autocast, and so under '
                    f'its emulation, but got {sorted(map(str, dtypes))}')
            if len(dtypes) > 1:
                args, kwargs = _single((args, kwargs))
            return inside(*args, **kwargs)

    return kernel


def _banned(op: Kernel) -> Kernel:

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            'binary_cross_entropy is refused under CUDA autocast, and so '
            'under its emulation: its input has already been rounded to '
            'half. Use binary_cross_entropy_with_logits, or a region with '
            'autocast(enabled=False).')

    return kernel


def _overload(name: str) -> Any:
    packet, _, overload = name.partition('.')
    return getattr(getattr(torch.ops.aten, packet), overload or 'default')


def _name(op: Any) -> str:
    packet, _, overload = str(op).partition('.')[2].partition('.')
    return packet if overload == 'default' else f'{packet}.{overload}'


def _packet(op: Any) -> str:
    """Return the name of an operation as a person knows it."""
    return _name(op).partition('.')[0].lstrip('_')


def _fp32_inside(op: Kernel) -> Kernel:
    """Compute in fp32, and round to the dtype of the inputs.

    For an operation that a GPU has a half kernel for. Inputs of several
    dtypes are left to torch, which promotes or refuses them.
    """
    name = _packet(op)

    def single(value: Any) -> Any:
        is_half = isinstance(value, torch.dtype) and value in HALVES
        return torch.float32 if is_half else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            dtypes = dtypes_of(args, kwargs)
            named = next((value for value in (*args, *kwargs.values())
                          if isinstance(value, torch.dtype)), None)
            if named is None:
                is_half = len(dtypes) == 1 and dtypes <= set(HALVES)
            else:
                is_half = named in HALVES and len(dtypes) < 2
            if not is_half:
                return op(*args, **kwargs)
            (dtype, ) = dtypes if named is None else {named}
            with as_one(name):
                args, kwargs = _single((args, kwargs))
                out = op(*map(single, args), **{
                    key: single(value) for key, value in kwargs.items()})
                return _to(dtype, out)

    return kernel


def _in_place(op: Kernel) -> Kernel:
    """Compute in fp32, and write to the half tensor that is the first."""
    name = _packet(op).rstrip('_')

    def kernel(first: Any, *args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            dtypes = dtypes_of(first, args, kwargs)
            if len(dtypes) != 1 or not dtypes <= set(HALVES):
                return op(first, *args, **kwargs)
            with as_one(name):
                args, kwargs = _single((args, kwargs))
                return first.copy_(op(first.float(), *args, **kwargs))

    return kernel


def _switched(maker: Callable[[Kernel], Kernel], op: Kernel) -> Kernel:
    """Make a kernel for where autocast is on, and one for where it is off."""
    on, off = maker(op), _fp32_inside(op)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (on if autocast_is_on() else off)(*args, **kwargs)

    return call


def _norm(op: Kernel) -> Kernel:
    """Compute in fp32 what the CPU would keep in half, or cannot.

    The statistics are written to in their own dtype.
    """

    def kernel(input: Any, *args: Any) -> Any:  # noqa: A002
        # They are weight, bias, mean, variance and settings.
        with _below_autocast():
            if not eligible(input) or (AUTOCAST_BY_DEVICE
                                       and args[0] is not None):
                return op(input, *args)
            with as_one('native_batch_norm'):
                wide = _single(args[:4])
                out = op(input.float(), *wide, *args[4:])
                for kept, value in zip(args[2:4], wide[2:]):
                    if value is not None and kept.dtype != value.dtype:
                        kept.copy_(value)
                return _to(input.dtype, out)

    return kernel


def stock_only(kernels: Iterable[str]) -> list[str]:
    """Return the overloads on the lists of the CPU's own autocast alone.

    Args:
        kernels: Overloads that CUDA's lists have.
    """
    ours = set(kernels)
    return [name[len('aten::'):]
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith('aten::') and name[len('aten::'):] not in ours
            and torch._C._dispatch_has_kernel_for_dispatch_key(
                name, 'AutocastCPU')]


def half_kernels(cache: CastCache) -> dict[str, Kernel]:
    """Return a kernel for each overload that this torch has.

    Args:
        cache: Half copies of weights.

    Returns:
        ``{'conv2d': kernel, 'norm.Scalar': kernel, ...}``.
    """
    lower = functools.partial(_lower, cache=cache)
    lists: Lists = [
        (op_lists.LOWER, lower), (op_lists.LOWER_CUDNN, lower),
        (op_lists.FP32, _fp32), (op_lists.FP32_OUTPUT, _fp32_output),
        (op_lists.FP32_APPEND, _fp32_append), (op_lists.PROMOTE, _promote),
        (op_lists.BANNED, _banned)]
    if not AUTOCAST_BY_DEVICE:
        lists = [(names, functools.partial(_switched, maker))
                 for names, maker in lists]
        lists += [(op_lists.NO_HALF_BEFORE_24, _fp32_inside),
                  (op_lists.IN_PLACE_BEFORE_24, _in_place)]
    lists += [(op_lists.NORMS, _norm), (op_lists.IN_PLACE, _in_place),
              (op_lists.NO_HALF_ON_CPU, _fp32_inside)]
    kernels: dict[str, Kernel] = {}
    for names, maker in lists:
        for name in names:
            try:
                op = _overload(name)
            except AttributeError:
                # An older torch lacks the newest operations.
                continue
            kernel = maker(op)
            # Older dynamos trace what a kernel calls.
            kernels[name] = kernel if AUTOCAST_BY_DEVICE else (
                not_compiled(kernel))
    return kernels


def destroy(library: Any) -> None:
    """Take back what a ``torch.library.Library`` has registered.

    The caller drops it: where it cannot be told to (2.1.2), its registrations
    live as long as the object does.
    """
    if hasattr(library, '_destroy'):
        library._destroy()
