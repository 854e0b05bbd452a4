"""CUDA autocast's lists of operations, as kernels for a CPU.

Source of the lists: ``ATen/autocast_mode.h`` of PyTorch. Each kernel is what
that header says of its list, with one difference: an operation that a GPU
runs on half tensor cores is computed as they do it, inputs rounded to half,
products summed in fp32, the result rounded to half. Autograd rounds the
gradients at the same casts. An operation made of several products (a chain
of matrices, a recurrent cell) is rounded once, at its end.

What is on none of CUDA's lists but on one of the CPU's own autocast is let
through, and runs in the dtype that it is given. The CPU's half kernels
compute in fp32 and round once, like CUDA's, but for sums that they gather
step by step (``index_add``, ``index_put`` with accumulation, and their like),
which stop growing where a step is below half a unit in the last place.
"""
import functools
import threading
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

__all__ = ['CastCache', 'computing', 'half_kernels', 'stock_only']

# Run in half: inputs rounded to the autocast dtype, fp32 accumulation.
LOWER = ('_convolution _convolution.deprecated '
         '_scaled_dot_product_flash_attention _thnn_fused_gru_cell '
         '_thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm '
         'chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d '
         'conv_transpose2d.input conv_transpose3d.input convolution einsum '
         'gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm '
         'mv prelu rnn_relu_cell rnn_tanh_cell '
         'scaled_dot_product_attention').split()

# Sent to cuDNN on a GPU, whose binding casts everything to half by itself.
# cuDNN's state between time steps, in half too, is kept in fp32 here.
LOWER_CUDNN = ('gru.data gru.input lstm.data lstm.input rnn_relu.data '
               'rnn_relu.input rnn_tanh.data rnn_tanh.input').split()

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

BANNED = ('binary_cross_entropy', )

# On no list of CUDA's. Without weights the CPU keeps their statistics in
# half, where CUDA keeps them in fp32: a variance above 65504 would be inf.
UNWEIGHTED_NORMS = ('batch_norm', 'instance_norm')

# On no list of CUDA's, which has half kernels where the CPU has none.
NO_HALF_ON_CPU = ('avg_pool3d', 'rrelu')

_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_below_autocast = functools.partial(torch._C._ExcludeDispatchKeyGuard, _BELOW)

Kernel = Callable[..., Any]


class _Computing(threading.local):
    """The half operation that this thread computes in several steps."""

    name: Optional[str] = None
    count = 0


_COMPUTING = _Computing()


def computing() -> Tuple[Optional[str], int]:
    """Name of the half operation that is being computed, or None.

    With it a number that tells one call from the next.

    What it is made of here (products in fp32, a rounding) is one operation
    on a GPU; the rounding of an fp32 input in front of it is another.
    """
    return _COMPUTING.name, _COMPUTING.count


class CastCache:
    """Half copies of weights, one a weight and autocast region.

    A weight that is used several times in a region, as in a head shared by
    feature levels, is rounded once. Its gradients meet at that copy and are
    summed in half: the sum can overflow where no part does. CUDA's cache
    holds leaves that need a gradient, and nothing else; a copy made without
    gradients would cut the weight off from a later use with them.
    """

    def __init__(self) -> None:
        self._copies: Dict[int, Tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Forget all copies; autocast does so at the end of a region."""
        self._copies.clear()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in half; float64 is not for this."""
        if tensor.dtype == dtype:
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf
                and tensor.dtype == torch.float32 and not tensor._is_view()
                and torch.is_autocast_cache_enabled()
                and torch.is_grad_enabled()):
            return tensor.to(dtype)
        known, copy = self._copies.get(id(tensor), (None, None))
        if known is not tensor or copy is None or copy.dtype != dtype:
            copy = tensor.to(dtype)
            self._copies[id(tensor)] = (tensor, copy)
        return copy


def _autocast_dtype() -> torch.dtype:
    if hasattr(torch, 'get_autocast_dtype'):
        return torch.get_autocast_dtype('cpu')
    return torch.get_autocast_cpu_dtype()


def _eligible(value: Any) -> bool:
    """Floating tensors on a CPU but fp64, which autocast leaves."""
    return (isinstance(value, Tensor) and value.is_floating_point()
            and value.dtype != torch.float64 and value.device.type == 'cpu')


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply to every eligible tensor."""
    if isinstance(value, Tensor):
        return function(value) if _eligible(value) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, item) for item in value)
    return value


def _cast(args: Any, kwargs: Dict[str, Any],
          function: Callable[[Tensor], Tensor]
          ) -> Tuple[Any, Dict[str, Any]]:
    return (tuple(_map(function, value) for value in args),
            {key: _map(function, value) for key, value in kwargs.items()})


def _lower(op: Kernel, cache: CastCache) -> Kernel:
    name = _name(op).partition('.')[0].lstrip('_')

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = _autocast_dtype()
        with _below_autocast():
            seen: List[bool] = []

            def rounded(tensor: Tensor) -> Tensor:
                seen.append(True)
                return cache.cast(tensor, dtype)

            args, kwargs = _cast(args, kwargs, rounded)
            outer, _COMPUTING.name = _COMPUTING.name, name
            _COMPUTING.count += 1
            try:
                args, kwargs = _cast(args, kwargs, Tensor.float)
                out = op(*args, **kwargs)
                return _map(lambda t: t.to(dtype), out) if seen else out
            finally:
                _COMPUTING.name = outer

    return kernel


def _fp32(op: Kernel) -> Kernel:

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            args, kwargs = _cast(args, kwargs, Tensor.float)
            return op(*args, **kwargs)

    return kernel


def _fp32_output(op: Kernel) -> Kernel:

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
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
        with _below_autocast():
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

        def look(tensor: Tensor) -> Tensor:
            dtypes.add(tensor.dtype)
            return tensor

        with _below_autocast():
            _cast(args, kwargs, look)
            if not dtypes <= {torch.float32, _autocast_dtype()}:
                raise RuntimeError(
                    'Expected floating inputs to be fp32 or '
                    f'{_autocast_dtype()} under CUDA autocast, and so under '
                    f'its emulation, but got {sorted(map(str, dtypes))}')
            if len(dtypes) > 1:
                args, kwargs = _cast(args, kwargs, Tensor.float)
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


def _fp32_inside(op: Kernel) -> Kernel:

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            if _eligible(args[0]):
                return op(args[0].float(), *args[1:], **kwargs).to(
                    args[0].dtype)
            return op(*args, **kwargs)

    return kernel


def _unweighted_norm(op: Kernel) -> Kernel:
    inside = _fp32_inside(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or args[1] is None:
            return inside(*args, **kwargs)
        with _below_autocast():
            return op(*args, **kwargs)

    return kernel


def stock_only(kernels: Iterable[str]) -> List[str]:
    """Overloads on the lists of the CPU's own autocast alone.

    Args:
        kernels: Overloads that CUDA's lists have.
    """
    ours = set(kernels)
    return [name[len('aten::'):]
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith('aten::') and name[len('aten::'):] not in ours
            and torch._C._dispatch_has_kernel_for_dispatch_key(
                name, 'AutocastCPU')]


def half_kernels(cache: CastCache) -> Dict[str, Kernel]:
    """Every overload that this torch has, with the kernel it gets.

    Args:
        cache: Half copies of weights.

    Returns:
        ``{'conv2d': kernel, 'norm.Scalar': kernel, ...}``.
    """
    lower = functools.partial(_lower, cache=cache)
    makers = [(LOWER, lower), (LOWER_CUDNN, lower), (FP32, _fp32),
              (FP32_OUTPUT, _fp32_output), (FP32_APPEND, _fp32_append),
              (PROMOTE, _promote), (BANNED, _banned),
              (UNWEIGHTED_NORMS, _unweighted_norm),
              (NO_HALF_ON_CPU, _fp32_inside)]
    kernels: Dict[str, Kernel] = {}
    for names, maker in makers:
        for name in names:
            try:
                op = _overload(name)
            except AttributeError:
                # An older torch lacks the newest operations.
                continue
            kernels[name] = maker(op)  # type: ignore[operator]
    return kernels
