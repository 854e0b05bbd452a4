"""Half precision on a CPU, with the numerics of CUDA autocast.

``torch.autocast('cpu', torch.float16)`` keeps other lists of operations than
CUDA's autocast, and native half convolutions on a CPU are about 30 times
slower than fp32. Here CUDA's lists are registered on the ``AutocastCPU``
dispatch key, the level at which CUDA's own autocast works, so that tensor
methods, operators and C++ callers are covered alike. An operation that CUDA
runs on half tensor cores is computed as they do it: inputs rounded to half,
products summed in fp32, the result rounded to half, in backward too, since
autograd rounds the gradients at the same casts.

The registration stands while a :func:`cuda_autocast` or an
:func:`installed` region is open and is taken back after it.

Source of the lists: ``ATen/autocast_mode.h`` of PyTorch.
"""
import contextlib
import functools
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
    Tuple,
)

import torch

__all__ = ['cuda_autocast', 'half_kernels', 'installed']

# Run in half: inputs rounded to the autocast dtype, fp32 accumulation.
LOWER = ('_convolution _convolution.deprecated addbmm addmm addmv addr '
         'baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc '
         'conv_transpose1d conv_transpose2d.input conv_transpose3d.input '
         'convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear '
         'lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell '
         'scaled_dot_product_attention').split()

# Run in fp32: half inputs are widened first.
FP32 = ('_upsample_bicubic2d_aa _upsample_bilinear2d_aa '
        '_upsample_nearest_exact1d _upsample_nearest_exact2d '
        '_upsample_nearest_exact3d acos asin '
        'binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss '
        'cosine_similarity dist erfinv exp expm1 frobenius_norm.dim '
        'group_norm hinge_embedding_loss huber_loss kl_div l1_loss '
        'layer_norm log log10 log1p log2 logsumexp margin_ranking_loss '
        'mse_loss multi_margin_loss multilabel_margin_loss '
        'native_layer_norm nll_loss nll_loss2d nuclear_norm '
        'nuclear_norm.dim pdist poisson_nll_loss pow.Scalar '
        'pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm '
        'rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan '
        'triplet_margin_loss upsample_bicubic2d upsample_bilinear2d '
        'upsample_linear1d upsample_nearest1d upsample_nearest2d '
        'upsample_nearest3d upsample_trilinear3d').split()

# Reductions that take an output dtype: fp32 where the caller names none.
FP32_OUTPUT = ('cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord '
               'linalg_vector_norm log_softmax.int prod prod.dim_int '
               'softmax.int sum sum.dim_IntList').split()

# Overloads without an output dtype: sent to the overload that has one.
FP32_APPEND = {'norm.Scalar': 'norm.ScalarOpt_dtype',
               'norm.ScalarOpt_dim': 'norm.ScalarOpt_dim_dtype'}

# Run in the widest dtype among the inputs.
PROMOTE = ('addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put '
           'scatter_add tensordot vdot').split()

BANNED = ('binary_cross_entropy',)

_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_HALVES = (torch.float16, torch.bfloat16)

Kernel = Callable[..., Any]


def _autocast_dtype() -> torch.dtype:
    if hasattr(torch, 'get_autocast_dtype'):
        return torch.get_autocast_dtype('cpu')
    return torch.get_autocast_cpu_dtype()


def _map(function: Callable[[torch.Tensor], torch.Tensor],
         value: Any) -> Any:
    """Apply to every floating tensor but fp64, which autocast leaves."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.dtype != torch.float64 and (
                value.device.type == 'cpu'):
            return function(value)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, item) for item in value)
    return value


def _cast(args: Any, kwargs: Dict[str, Any],
          function: Callable[[torch.Tensor], torch.Tensor]
          ) -> Tuple[Any, Dict[str, Any]]:
    return (tuple(_map(function, value) for value in args),
            {key: _map(function, value) for key, value in kwargs.items()})


def _lower(op: Kernel) -> Kernel:

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = _autocast_dtype()
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            seen: List[bool] = []

            def rounded(tensor: torch.Tensor) -> torch.Tensor:
                seen.append(True)
                return tensor.to(dtype).float()

            args, kwargs = _cast(args, kwargs, rounded)
            out = op(*args, **kwargs)
            return _map(lambda t: t.to(dtype), out) if seen else out

    return kernel


def _fp32(op: Kernel) -> Kernel:

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            args, kwargs = _cast(args, kwargs, torch.Tensor.float)
            return op(*args, **kwargs)

    return kernel


def _eligible(value: Any) -> bool:
    return (isinstance(value, torch.Tensor) and value.is_floating_point()
            and value.dtype != torch.float64)


def _fp32_output(op: Kernel) -> Kernel:

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            if _eligible(args[0]) and kwargs.get('dtype') is None:
                dtype_at = _positional_dtype(op)
                if dtype_at is not None and len(args) > dtype_at:
                    if args[dtype_at] is not None:
                        return op(*args, **kwargs)
                    args = args[:dtype_at]
                kwargs['dtype'] = torch.float32
            return op(*args, **kwargs)

    return kernel


@functools.lru_cache(maxsize=None)
def _positional_dtype(op: Any) -> Optional[int]:
    """Index of ``dtype`` where it may be passed by position."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == 'dtype' and not argument.kwarg_only:
            return index
    return None


def _fp32_append(op: Kernel) -> Kernel:
    with_dtype = _overload(FP32_APPEND[_name(op)])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            if not _eligible(args[0]):
                return op(*args, **kwargs)
            args = (*args, *(() if len(args) > 1 else (2,)))
            if _name(op) == 'norm.ScalarOpt_dim' and len(args) < 4:
                args = (*args, False)
            return with_dtype(*args, **kwargs, dtype=torch.float32)

    return kernel


def _promote(op: Kernel) -> Kernel:

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtypes = set()

        def look(tensor: torch.Tensor) -> torch.Tensor:
            dtypes.add(tensor.dtype)
            return tensor

        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            _cast(args, kwargs, look)
            if len(dtypes) > 1:
                args, kwargs = _cast(args, kwargs, torch.Tensor.float)
            return op(*args, **kwargs)

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


def half_kernels() -> Dict[str, Kernel]:
    """Every overload that this torch has, with the kernel it gets.

    Returns:
        ``{'conv2d': kernel, 'norm.Scalar': kernel, ...}``.
    """
    makers = [(LOWER, _lower), (FP32, _fp32), (FP32_OUTPUT, _fp32_output),
              (tuple(FP32_APPEND), _fp32_append), (PROMOTE, _promote),
              (BANNED, _banned)]
    kernels: Dict[str, Kernel] = {}
    for names, maker in makers:
        for name in names:
            try:
                op = _overload(name)
            except AttributeError:
                # An older torch lacks the newest operations.
                continue
            kernels[name] = maker(op)
    return kernels


class _Installation:
    """The registration, counted so that regions may nest."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._library: Optional[Any] = None
        self._kernels: Dict[str, Kernel] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._register()

    def __exit__(self, *exc: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._library is not None:
                self._library._destroy()
                self._library = None

    def _register(self) -> None:
        self._kernels = self._kernels or half_kernels()
        with warnings.catch_warnings():
            # torch warns that its own CPU list is overridden, which is
            # what we are here for.
            warnings.simplefilter('ignore')
            self._library = torch.library.Library('aten', 'IMPL')
            for name, kernel in self._kernels.items():
                self._library.impl(name, kernel, 'AutocastCPU')


_INSTALLATION = _Installation()


def installed() -> ContextManager[None]:
    """Keep the registration for a region, without entering autocast.

    A backward pass that recomputes a checkpointed forward needs it.
    Regions may nest.
    """
    return _INSTALLATION


@contextlib.contextmanager
def cuda_autocast(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    """Autocast on a CPU with the numerics of CUDA's autocast.

    Tensors carry the dtypes that a GPU would give them. Costs no read from
    the device.

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
    with _INSTALLATION, torch.autocast('cpu', dtype):
        yield
