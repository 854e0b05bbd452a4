"""Against PyTorch's own answer key for CUDA autocast, and by property."""
from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from helpers.torch_features import needs_half
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils.checkpoint import checkpoint

from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.emulation.autocast import HAS_HALF_ON_CPU
from mmdet_nanfix.emulation.casting import CastCache
from mmdet_nanfix.emulation.kernels import destroy
from mmdet_nanfix.torch_support.features import (
    AUTOCAST_BY_DEVICE,
)

HALF = torch.float16
CUDA_ONLY = {
    'cudnn_convolution': 'a binding of cuDNN',
    'cudnn_convolution_transpose': 'a binding of cuDNN',
}
FOUND = 'ignore:(Using torch.cross|torch.chain_matmul is deprecated)'


def entries():
    """``(list, module, name, args, kwargs)`` of the whole key."""
    torch.manual_seed(0)
    key = AutocastTestLists(torch.device('cpu'))
    where = {'torch': torch, 'nn': torch._C._nn, 'linalg': torch._C._linalg,
             'methods': None}
    for name in sorted(vars(key)):
        if name == 'banned':
            for op, args, module in key.banned:
                yield name, module, op, args, {}
            continue
        prefix = name.partition('_')[0]
        for op, args, *rest in getattr(key, name):
            if isinstance(args, str):
                # einsum: the key's equation has four dimensions and its
                # operands two, so that nobody can run it as it stands.
                rest.clear()
                args = (args, torch.randn(2, 3, 2, 4), torch.randn(2, 5, 2, 4))
            kwargs = next((item for item in rest if isinstance(item, dict)),
                          {})
            yield name, where[prefix], op, args, kwargs


ENTRIES = list(entries()) if HAS_HALF_ON_CPU else []
pytestmark = needs_half


def calls(module, name, args):
    """The forms of an entry: a function, a method, or both."""
    if module is not None:
        yield getattr(module, name)
    if hasattr(Tensor, name) and isinstance(args[0], Tensor):
        yield getattr(Tensor, name)


def deep(function, value):
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(deep(function, item) for item in value)
    return value


def flat(value):
    return value if isinstance(value, (list, tuple)) else (value, )


def reference(kind, call, args, kwargs):
    """What CUDA computes, from the rule of the list alone."""
    if kind.endswith('fp16'):
        rounded = deep(lambda t: t.half().float(), args)
        return HALF, deep(Tensor.half, call(*rounded, **kwargs))
    if kind.endswith('fp32') or kind == 'torch_need_autocast_promote':
        return torch.float32, call(*deep(Tensor.float, args), **kwargs)
    return None, call(*args, **kwargs)


def test_the_key_is_whole():
    counts = collections.Counter(kind for kind, *_ in ENTRIES)
    # Torch 2.1 lacks linalg.vecdot, rms_norm and vdot in it.
    newer = AUTOCAST_BY_DEVICE
    assert counts == {
        'banned': 1, 'linalg_fp16': 1 + newer,
        'methods_expect_builtin_promote': 9, 'methods_fp16': 1,
        'methods_fp32': 1, 'nn_fp16': 1, 'nn_fp32': 9,
        'torch_expect_builtin_promote': 12, 'torch_fp16': 28,
        'torch_fp32': 43 + newer, 'torch_need_autocast_promote': 12 + newer}
    assert {name for _, _, name, *_ in ENTRIES} >= set(CUDA_ONLY)


@pytest.mark.filterwarnings(FOUND)
@pytest.mark.parametrize(
    'kind, module, name, args, kwargs',
    [entry for entry in ENTRIES
     if entry[0] != 'banned' and entry[2] not in CUDA_ONLY],
    ids=lambda value: value if isinstance(value, str) else '')
def test_dtype_and_value(kind, module, name, args, kwargs):
    for call in calls(module, name, args):
        torch.manual_seed(0)
        dtype, wanted = reference(kind, call, args, kwargs)
        torch.manual_seed(0)
        with cuda_autocast():
            out = call(*args, **kwargs)
        for got, want in zip(flat(out), flat(wanted)):
            if isinstance(want, Tensor):
                assert got.dtype == (dtype or want.dtype)
                assert torch.equal(got, want) or torch.allclose(
                    got.float(), want.float(), rtol=0, atol=0,
                    equal_nan=True)
            else:
                assert got == want


@pytest.mark.parametrize('name', sorted(CUDA_ONLY))
def test_what_a_cpu_cannot_run(name):
    args = next(entry[3] for entry in ENTRIES if entry[2] == name)
    with pytest.raises((NotImplementedError, RuntimeError)):
        getattr(torch, name)(*args)


def test_the_banned_operation():
    (entry, ) = [entry for entry in ENTRIES if entry[0] == 'banned']
    _, module, name, args, _ = entry
    with cuda_autocast(), pytest.raises(RuntimeError, match=name):
        getattr(module, name)(*args)


values = st.floats(-70000., 70000., width=32)
small = st.floats(-2.**-14, 2.**-14, width=32)


def tensor_of(draw, *shape, elements=None):
    count = 1
    for size in shape:
        count *= size
    mixed = values | small | st.floats(-8., 8., width=32)
    numbers = draw(st.lists(elements or mixed, min_size=count,
                            max_size=count))
    return torch.tensor(numbers).reshape(shape)


def rounded(x):
    return x.half().float()


CONTRACTIONS = {
    'linear': ((2, 3), (4, 3), F.linear),
    'matmul': ((2, 3), (3, 2), torch.matmul),
    'bmm': ((1, 2, 3), (1, 3, 2), torch.bmm),
    'conv2d': ((1, 2, 3, 3), (2, 2, 2, 2), F.conv2d),
}


@pytest.mark.parametrize('name', sorted(CONTRACTIONS))
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_the_result_is_the_rounded_fp32_product(name, data):
    """Inf exactly where rounding has it, subnormals kept, and backward."""
    left, right, op = CONTRACTIONS[name]
    a = tensor_of(data.draw, *left).requires_grad_()
    b = tensor_of(data.draw, *right).requires_grad_()
    with cuda_autocast():
        out = op(a, b)
    ra, rb = rounded(a).detach(), rounded(b).detach()
    ra.requires_grad_(), rb.requires_grad_()
    wanted = op(ra, rb)
    same(out, wanted.half())
    grad = rounded(tensor_of(data.draw, *out.shape))
    out.backward(grad.half())
    wanted.backward(grad)
    same(a.grad, rounded(ra.grad))
    same(b.grad, rounded(rb.grad))


def same(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=50)
@given(values | small)
def test_one_product_is_ieee_rounding(value):
    with cuda_autocast():
        out = F.linear(torch.tensor([[value]]), torch.ones(1, 1))
    same(out[0, 0], torch.tensor(value).half())


def test_a_shared_weight_sums_its_gradients_in_half():
    weight = torch.ones(1, 1, requires_grad=True)
    x = torch.full((1, 1), 200.)
    with cuda_autocast():
        outs = [F.linear(x, weight) for _ in range(4)]
    sum(out.float() * 100 for out in outs).sum().backward()
    # Each part is 20,000; the sum is above the largest half.
    assert torch.isinf(weight.grad).all()
    weight.grad = None
    with cuda_autocast(), torch.autocast('cpu', HALF, cache_enabled=False):
        outs = [F.linear(x, weight) for _ in range(4)]
    sum(out.float() * 100 for out in outs).sum().backward()
    assert weight.grad.item() == 80000


def test_the_cache_holds_leaves_that_need_a_gradient_only():
    cache = CastCache()
    leaf = torch.ones(2, requires_grad=True)
    with cuda_autocast():
        assert cache.cast(leaf, HALF) is cache.cast(leaf, HALF)
        assert cache.cast(leaf, torch.bfloat16).dtype == torch.bfloat16
        for other in (torch.ones(2), leaf * 2, leaf[:1]):
            assert cache.cast(other, HALF) is not cache.cast(other, HALF)
        first = cache.cast(leaf, HALF)
        cache.clear()
        assert cache.cast(leaf, HALF) is not first
    ready = torch.ones(2).half()
    assert cache.cast(ready, HALF) is ready


def test_the_cache_ends_with_the_region():
    weight = torch.ones(1, 1, requires_grad=True)
    with cuda_autocast():
        before = F.linear(torch.ones(1, 1), weight)
    with torch.no_grad():
        weight.fill_(3.)
    with cuda_autocast():
        after = F.linear(torch.ones(1, 1), weight)
    assert (before.item(), after.item()) == (1., 3.)


def test_in_place_and_out_are_not_cast():
    a, b = torch.rand(3, 3), torch.rand(3, 3)
    c = torch.rand(3, 3)
    with cuda_autocast():
        out = torch.empty(3, 3)
        torch.mm(a, b, out=out)
        assert out.dtype == torch.float32
        assert not torch.equal(out, rounded(out))
        assert c.addmm_(a, b).dtype == torch.float32
        assert a.half().exp_().dtype == HALF
        # Mixed in place is refused, as on a GPU.
        with pytest.raises(RuntimeError, match='dtype|type'):
            c.addmm_(a.half(), b)
        x = torch.rand(3).half()
        assert torch.exp(x, out=torch.empty(3).half()).dtype == HALF


def test_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 4) * 30 for _ in range(3))
    with cuda_autocast():
        out = F.scaled_dot_product_attention(q, k, v)
    same(out, F.scaled_dot_product_attention(
        rounded(q), rounded(k), rounded(v)).half())
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8, requires_grad=True)
    for need_weights in (True, False):
        with cuda_autocast():
            out, weights = attention(x, x, x, need_weights=need_weights)
        assert out.dtype == HALF
        # The softmax of the explicit form is on the fp32 list.
        assert weights is None or weights.dtype == torch.float32
        out.sum().backward()
        wanted = attention(x, x, x)[0]
        assert (out - wanted).abs().max() < 5e-3


@pytest.mark.parametrize('layer', [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(layer):
    """As cuDNN's binding: everything in half, whatever the input is."""
    torch.manual_seed(0)
    module = layer(4, 6, num_layers=2, bidirectional=True)
    x = torch.randn(5, 3, 4, requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2])
    for given_ in (x, packed):
        with cuda_autocast():
            out, state = module(given_)
        wanted, _ = module(given_)
        if given_ is packed:
            out, wanted = out.data, wanted.data
        assert {out.dtype, *(s.dtype for s in flat(state))} == {HALF}
        assert (out - wanted).abs().max() < 2e-3
        out.sum().backward()
        assert x.grad.isfinite().all()


def test_unweighted_batch_norm_keeps_its_statistics_in_fp32():
    torch.manual_seed(0)
    x = (torch.randn(2, 3, 4, 4) * 1000).half()
    for op in (F.instance_norm,
               lambda t: F.batch_norm(t, None, None, training=True)):
        with cuda_autocast():
            out = op(x)
        assert out.dtype == HALF
        same(out, op(x.float()).half())


def test_operations_on_no_list_round_once():
    """What is not registered relies on the CPU's own half kernels."""
    torch.manual_seed(0)
    x = (torch.rand(2, 8, 6, 6) * 50000).half()
    for op in (torch.mean, lambda t: t.mean((2, 3)), lambda t: t.var(1),
               lambda t: F.avg_pool2d(t, 3), torch.sigmoid, torch.tanh,
               lambda t: F.adaptive_avg_pool2d(t, 2), F.gelu, F.silu,
               lambda t: t * 1.5, lambda t: t + t, lambda t: t / 3,
               lambda t: F.max_pool2d(t, 2), F.logsigmoid, F.hardswish):
        with cuda_autocast():
            out = op(x)
        assert out.dtype == HALF
        torch.testing.assert_close(out, op(x.float()).half(), rtol=1e-3,
                                   atol=0)


@pytest.mark.parametrize('quiet', [torch.no_grad, torch.inference_mode])
def test_a_use_without_gradients_does_not_cut_a_weight_off(quiet):
    linear = nn.Linear(3, 3)
    with cuda_autocast():
        with quiet():
            linear(torch.rand(2, 3))
        out = linear(torch.rand(2, 3))
    out.float().sum().backward()
    assert linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize('reentrant', [True, False])
@pytest.mark.parametrize('inside', [True, False])
def test_a_weight_that_is_shared_with_a_checkpoint(reentrant, inside):
    linear = nn.Linear(3, 3, bias=False)
    x = torch.ones(2, 3, requires_grad=True)
    with cuda_autocast():
        out = checkpoint(linear, x, use_reentrant=reentrant) + linear(x * 2)
        if inside:
            out.float().sum().backward()
    if not inside:
        out.float().sum().backward()
    assert linear.weight.grad.unique().tolist() == [6.]


def pads(x):
    return F.pad(x, (1, 1, 1, 1), mode='reflect')


@pytest.mark.parametrize('op', [
    pads, lambda x: F.pad(x, (1, 1, 1, 1), mode='replicate'),
    lambda x: F.max_pool3d(x, 2), lambda x: F.avg_pool3d(x, 2),
    lambda x: F.adaptive_avg_pool3d(x, 2), lambda x: torch.trace(x[0, 0]),
    lambda x: F.rrelu(x, training=True), lambda x: torch.cat([x, x]),
    lambda x: torch.stack([x, x])])
@pytest.mark.parametrize('dtype', [HALF, torch.bfloat16])
@pytest.mark.parametrize('region', [HALF, torch.bfloat16])
def test_what_only_the_cpus_lists_have_is_let_through(op, dtype, region):
    x = torch.rand(2, 2, 4, 4).to(dtype)
    with cuda_autocast(region):
        assert op(x).dtype == dtype
    # A region of the CPU's own has its own lists back.
    with torch.autocast('cpu', torch.bfloat16):
        assert pads(x.bfloat16()).dtype == torch.float32


def test_padding_by_name_is_the_same_convolution():
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 4, 3, padding='same', bias=False)
    x = torch.randn(1, 64, 5, 5)
    with cuda_autocast():
        same(conv(x), F.conv2d(x, conv.weight, padding=1))


def test_the_other_half_type_is_refused_by_promotion():
    x = torch.rand(3).bfloat16()
    with cuda_autocast(), pytest.raises(RuntimeError, match='bfloat16'):
        torch.addcmul(x, x, x)


def test_what_a_library_has_registered_ends():
    half = torch.ones(1).half()
    library = torch.library.Library('aten', 'IMPL')
    library.impl('sinh', lambda x: x.float() * 7, 'AutocastCPU')
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.sinh(half).item() == 7
    destroy(library)
    del library
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.sinh(half.float()).item() != 7
