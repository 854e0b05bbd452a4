"""Against PyTorch's own table of operations: their dtypes on either device."""
from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from helpers.torch_features import needs_half
from torch import Tensor
from torch.utils._pytree import tree_map

from mmdet_nanfix.emulation import cuda_autocast, op_lists
from mmdet_nanfix.torch_support.features import AUTOCAST_BY_DEVICE, tree_leaves

HALF = torch.float16
# What the emulation does not have, with the reason. Those of torch's table
# that are internal are named by what calls them.
LEFT = {
    'bfloat16': 'bfloat16 is what is asked for',
    'nn.functional.binary_cross_entropy': 'is refused with autocast on',
    'to_sparse': 'the gradient of this test is dense',
    **dict.fromkeys((f'jiterator_{name}' for name in (
        'unary', 'binary', 'binary_return_by_ref', '2inputs_2outputs',
        '4inputs_with_extra_args')), 'is compiled for a GPU'),
    **(dict.fromkeys((
        'nn.functional.avg_pool3d', 'nn.functional.rrelu',
        'nn.functional.rrelu_',
        '_upsample_bilinear2d_aa', 'nn.functional.multi_margin_loss',
        'nn.functional.multilabel_margin_loss'),
        'with autocast off a CPU refuses half') if AUTOCAST_BY_DEVICE else
       dict.fromkeys((
           '_softmax_backward_data', 'native_batch_norm',
           '_native_batch_norm_legit', 'max_pool2d_with_indices_backward'),
           'is called by kernels, which compute in fp32')),
    'addbmm_': 'torch 2.1 resizes what it writes to',
    'matrix_exp': 'mixes dtypes inside',
    'torch.ops.aten._safe_softmax.default': 'is called by attention',
}


def to_half(value):
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    return value.detach().half().requires_grad_(value.requires_grad)


def backward(out):
    """Go back from what came out, and return its tensors."""
    found = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
    ends = [value for value in found if value.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    return found


def run(call, sample, enabled, in_place=False):
    """Dtypes that come out; goes back from them too."""
    first, args, kwargs = tree_map(
        to_half, (sample.input, sample.args, sample.kwargs))
    with cuda_autocast(), torch.autocast('cpu', enabled=enabled):
        out = call(first.clone() if in_place else first, *args, **kwargs)
    return {value.dtype for value in backward(out)}


def runs_in_place(call, sample):
    """Whether it does in fp32, with these shapes and a gradient."""
    try:
        backward(call(sample.input.clone(), *sample.args, **sample.kwargs))
    except Exception:
        return False
    return True


@needs_half
@pytest.mark.filterwarnings('ignore')
def test_what_a_gpu_has_in_half_is_emulated():
    """Nothing is refused for its dtype, and nothing runs in bfloat16.

    Torch's own list for a CPU does the latter, in silence, before 2.4.
    """
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        from torch.testing._internal.common_methods_invocations import op_db
    bad, seen = {}, 0
    for operation in op_db:
        on_gpu = operation.dtypesIfCUDA
        if HALF not in on_gpu or torch.float32 not in operation.dtypes or (
                operation.name.startswith('fft.')):
            # cuFFT takes half for powers of two only.
            continue
        back = operation.supports_autograd and HALF in (
            operation.backward_dtypesIfCUDA or ())
        samples = operation.sample_inputs('cpu', torch.float32,
                                          requires_grad=back)
        for sample in itertools.islice(samples, 2):
            for enabled in (True, False):
                for in_place, call in enumerate((
                        operation.op, operation.inplace_variant)):
                    if call is None or in_place and not runs_in_place(
                            call, sample):
                        continue
                    seen += 1
                    name = f'{operation.name}{"_" * in_place}'
                    try:
                        dtypes = run(call, sample, enabled, in_place)
                    except Exception as error:
                        bad[name] = f'{enabled}: {error}'[:200]
                    else:
                        if torch.bfloat16 in dtypes:
                            bad[name] = f'{enabled}: bfloat16'
    assert {name: said for name, said in bad.items()
            if name not in LEFT} == {}
    assert seen > 1500


def test_no_operation_is_on_two_lists():
    lists = [name for listed in op_lists.__all__
             for name in getattr(op_lists, listed)]
    assert len(lists) == len(set(lists)) > 150
