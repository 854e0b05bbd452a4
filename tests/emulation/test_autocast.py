from __future__ import annotations

import copy
import functools
import math
import os
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from helpers.torch_features import autocast_is_on, cudas_autocast_dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmdet_nanfix.emulation import autocast as emulation
from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.emulation.casting import CastCache
from mmdet_nanfix.emulation.kernels import half_kernels
from mmdet_nanfix.torch_support.features import AUTOCAST_BY_DEVICE

HALF = torch.float16
# A half type that this torch's own autocast takes on a CPU.
STOCK = HALF if AUTOCAST_BY_DEVICE else torch.bfloat16


def rounded(x):
    return x.half().float()


def header_lists():
    """Overloads by list, as torch's own C++ header names them."""
    path = os.path.join(os.path.dirname(torch.__file__), 'include', 'ATen',
                        'autocast_mode.h')
    with open(path) as file:
        text = file.read()
    lists = {}
    if 'AT_FORALL_FP32(' not in text:
        return lists
    for name in ('LOWER_PRECISION_FP', 'FP32', 'FP32_SET_OPT_DTYPE',
                 'PROMOTE'):
        body = re.search(rf'#define AT_FORALL_{name}\(_\)(.*?)\n\n', text,
                         re.DOTALL).group(1)
        lists[name] = {
            '.'.join(part.strip() for part in entry.split(','))
            for entry in re.findall(r'_\((\w+(?:, \w+)?)\)', body)}
    return lists


def test_every_overload_of_cudas_lists_is_registered():
    lists = header_lists()
    if not lists:
        pytest.skip('before torch 2.4 the header does not have the lists')
    assert sum(map(len, lists.values())) > 100
    registered = set(half_kernels(CastCache()))
    for wanted in lists.values():
        assert wanted - registered == set()


@pytest.mark.parametrize('call, dtype', [
    (lambda x: F.linear(x, x), HALF),
    (lambda x: x @ x, HALF),
    (lambda x: torch.bmm(x[None], x[None]), HALF),
    (lambda x: torch.einsum('ij,jk->ik', x, x), HALF),
    (lambda x: F.conv2d(x[None, None], x[None, None]), HALF),
    (lambda x: F.conv_transpose2d(x[None, None], x[None, None]), HALF),
    (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
     HALF),
    (lambda x: x.half().exp(), torch.float32),
    (lambda x: torch.log(x.half()), torch.float32),
    (lambda x: x.half()**2, torch.float32),
    (lambda x: 2**x.half(), torch.float32),
    (lambda x: x.half().softmax(-1), torch.float32),
    (lambda x: x.half().sum(), torch.float32),
    (lambda x: x.half().sum(0), torch.float32),
    (lambda x: x.half().norm(), torch.float32),
    (lambda x: x.half().norm(2, 0), torch.float32),
    (lambda x: torch.norm(x.half()), torch.float32),
    (lambda x: F.smooth_l1_loss(x.half(), x), torch.float32),
    (lambda x: F.cross_entropy(x.half(), torch.tensor([0, 1, 2])),
     torch.float32),
    (lambda x: F.layer_norm(x.half(), (3, )), torch.float32),
    (lambda x: F.interpolate(x.half()[None, None], scale_factor=2),
     torch.float32),
    # Arithmetic is on no list: half stays half, mixed is promoted.
    (lambda x: x.half() + x.half(), HALF),
    (lambda x: x.half().sigmoid(), HALF),
    (lambda x: x.half() * x, torch.float32),
    (lambda x: torch.atan2(x.half(), x), torch.float32),
    (lambda x: x.double() @ x.double(), torch.float64),
    (lambda x: x.long().sum(), torch.int64),
    (lambda x: x.half().sum(dtype=torch.float64), torch.float64),
])
def test_dtypes_are_those_of_cuda(call, dtype):
    x = torch.rand(3, 3) + .5
    with cuda_autocast():
        assert call(x).dtype == dtype


def test_half_kernels_round_inputs_and_result_but_not_the_sum():
    # 4096 products of 1: half would stop counting at 2048.
    ones = torch.ones(1, 4096)
    with cuda_autocast():
        assert F.linear(ones, ones).item() == 4096
    x, w = torch.randn(8, 33), torch.randn(5, 33)
    with cuda_autocast():
        out = F.linear(x, w)
    assert torch.equal(out, F.linear(rounded(x), rounded(w)).half())


numbers = st.floats(-300., 300., width=32)


@settings(deadline=None, max_examples=50)
@given(st.lists(numbers, min_size=4, max_size=4),
       st.lists(numbers, min_size=4, max_size=4))
def test_overflow_is_where_rounding_has_it(left, right):
    a, b = torch.tensor([left]), torch.tensor([right])
    with cuda_autocast():
        out = F.linear(a, b)
    assert torch.equal(out, F.linear(rounded(a), rounded(b)).half())


@pytest.mark.parametrize('value, kept', [
    (65504., 65504.), (65519., 65504.), (65520., math.inf),
    (-65520., -math.inf), (6e-8, 2.**-24), (2e-8, 0.)])
def test_limits_of_half(value, kept):
    with cuda_autocast():
        out = F.linear(torch.tensor([[value]]), torch.ones(1, 1))
    assert out.item() == kept


def test_gradients_are_rounded_and_overflow():
    x = torch.randn(4, 3, requires_grad=True)
    w = torch.randn(2, 3, requires_grad=True)
    with cuda_autocast():
        out = F.linear(x, w)
    (out.float() * 7.77).sum().backward()
    grad = torch.full((4, 2), 7.77).half().float()
    assert torch.equal(w.grad, rounded(grad.t() @ rounded(x)))
    assert torch.equal(x.grad, rounded(grad @ rounded(w)))
    w.grad = None
    with cuda_autocast():
        out = F.linear(torch.full((2, 3), 200.), w)
    (out.float() * 300).sum().backward()
    assert torch.isinf(w.grad).all()


def test_a_torch_that_is_too_old(monkeypatch, real_require):
    version = tuple(map(int, torch.__version__.split('.')[:2]))
    assert (version >= (2, 1)) == emulation.HAS_HALF_ON_CPU
    monkeypatch.setattr(emulation, 'HAS_HALF_ON_CPU', False)
    with pytest.raises(RuntimeError, match='needs torch 2.1'), (
            cuda_autocast()):
        pass
    assert not emulation.is_emulating()


def test_binary_cross_entropy_is_refused():
    p, t = torch.rand(3), torch.ones(3)
    with cuda_autocast():
        with pytest.raises(RuntimeError, match='binary_cross_entropy'):
            F.binary_cross_entropy(p, t)
        with torch.autocast('cpu', enabled=False):
            F.binary_cross_entropy(p, t)
        assert F.binary_cross_entropy_with_logits(
            p.half(), t).dtype == torch.float32


def test_disabled_regions_are_left_alone():
    x = torch.rand(3, 3)
    with cuda_autocast():
        with torch.autocast('cpu', enabled=False):
            assert F.linear(x, x).dtype == torch.float32
            assert x.half().exp().dtype == HALF
        assert F.linear(x, x).dtype == HALF


def test_nothing_is_left_behind():
    x = torch.rand(3, 3)

    def stock():
        with torch.autocast('cpu', STOCK):
            return x.to(STOCK).exp().dtype, F.linear(x, x)

    before = stock()
    with cuda_autocast(), emulation.installed(), cuda_autocast():
        assert x.half().exp().dtype == torch.float32
    with pytest.raises(ZeroDivisionError), cuda_autocast():
        raise ZeroDivisionError
    after = stock()
    assert before[0] == after[0] == STOCK == before[1].dtype
    assert torch.equal(before[1], after[1])
    assert F.linear(x, x).dtype == torch.float32


def test_bfloat16_and_impossible_dtypes():
    x = torch.rand(3, 3)
    with cuda_autocast(torch.bfloat16):
        assert F.linear(x, x).dtype == torch.bfloat16
        assert x.bfloat16().exp().dtype == torch.float32
    with pytest.raises(ValueError, match='float32'), cuda_autocast(
            torch.float32):
        pass


def test_checkpointed_forward_recomputes_the_same():
    from torch.utils.checkpoint import checkpoint
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    grads = []
    for use_reentrant in (None, False, True):
        net.zero_grad()
        with cuda_autocast():
            out = net(x) if use_reentrant is None else checkpoint(
                net, x, use_reentrant=use_reentrant)
        # The recomputation is in here, outside of the region.
        out.float().pow(2).sum().backward()
        del out
        assert not emulation._INSTALLATION.active
        grads.append([p.grad.clone() for p in net.parameters()])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other))


def test_recurrent_cells_run_in_half():
    with cuda_autocast():
        out = nn.GRUCell(3, 3)(torch.rand(2, 3))
    assert out.dtype == HALF


@pytest.mark.parametrize('region', [
    lambda: torch.autocast('cuda', enabled=False),
    lambda: torch.autocast('cpu', enabled=False)])
def test_disabled_regions_of_either_name(region):
    x = torch.rand(3, 3)
    with cuda_autocast():
        with region():
            assert F.linear(x, x).dtype == torch.float32
            assert not autocast_is_on('cuda')
            with torch.autocast('cuda', HALF):
                assert F.linear(x, x).dtype == HALF
            assert F.linear(x, x).dtype == torch.float32
        assert F.linear(x, x).dtype == HALF
        assert autocast_is_on('cuda')
        assert cudas_autocast_dtype() == HALF


@pytest.mark.filterwarnings('ignore:.*torch.cuda.amp.autocast:FutureWarning')
def test_the_old_name_of_a_disabled_region():
    x = torch.rand(3, 3)
    with cuda_autocast(), torch.cuda.amp.autocast(enabled=False):
        assert F.linear(x, x).dtype == torch.float32


def of_cuda(name):
    """Before torch 2.4 they are in the module of CUDA."""
    if hasattr(torch.amp, name):
        return functools.partial(getattr(torch.amp, name),
                                 device_type='cuda')
    return getattr(torch.cuda.amp, name)


custom_fwd, custom_bwd = of_cuda('custom_fwd'), of_cuda('custom_bwd')


def test_a_decorated_function_that_casts_its_inputs():
    seen = []

    class Square(torch.autograd.Function):

        @staticmethod
        @custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append((x.dtype, autocast_is_on()))
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            x, = ctx.saved_tensors
            seen.append((x.dtype, autocast_is_on()))
            return 2 * x * grad

    x = torch.rand(3, requires_grad=True)
    with cuda_autocast():
        out = Square.apply(x.half())
    assert out.dtype == torch.float32
    out.sum().backward()
    assert seen == [(torch.float32, False), (torch.float32, False)]


def test_a_decorated_function_runs_its_backward_under_the_same_rules():
    seen = []

    class Linear(torch.autograd.Function):

        @staticmethod
        @custom_fwd
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x.mm(w)

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            seen.append((grad.mm(w.t()).dtype, w.exp().dtype))
            return grad.mm(w.t()).float(), x.t().mm(grad).float()

    x = torch.rand(3, 3, requires_grad=True)
    with cuda_autocast():
        out = Linear.apply(x, x * 1)
    assert out.dtype == HALF
    out.float().sum().backward()
    assert seen == [(HALF, torch.float32)]
    del out
    assert not emulation._INSTALLATION.active


def test_everything_replaced_is_put_back():
    from torch.amp import autocast_mode
    names = [(torch, 'is_autocast_enabled'),
             (torch, 'get_autocast_dtype' if AUTOCAST_BY_DEVICE else
              'set_autocast_cpu_dtype'), (torch, 'clear_autocast_cache'),
             (autocast_mode if AUTOCAST_BY_DEVICE else
              torch.cuda.amp.autocast_mode, '_cast'),
             (autocast_mode.autocast, '__init__')]
    before = [getattr(place, name) for place, name in names]
    with cuda_autocast():
        assert all(getattr(place, name) is not old
                   for (place, name), old in zip(names, before))
        assert emulation.is_emulating()
    assert [getattr(place, name) for place, name in names] == before
    assert not emulation.is_emulating()


def product():
    return F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype


def test_a_region_made_before_counts_too():
    made = torch.autocast('cuda', enabled=False)

    @torch.autocast('cuda', enabled=False)
    def decorated():
        return product()

    with cuda_autocast():
        with made:
            assert product() == torch.float32
        assert product() == torch.float16
        assert decorated() == torch.float32
        assert product() == torch.float16
    assert made.device == 'cuda' and not emulation.is_emulating()


def test_the_switch_may_be_kept_and_copied():
    with cuda_autocast():
        kept = torch.is_autocast_enabled()
        assert kept is True and autocast_is_on('cuda') is True
        torch.set_autocast_enabled(False)
        assert product() == torch.float32
        torch.set_autocast_enabled(kept)
        assert product() == torch.float16
        if AUTOCAST_BY_DEVICE:
            torch.set_autocast_enabled('cuda', False)
            assert product() == torch.float32
            torch.set_autocast_enabled('cuda', True)
    assert not emulation.is_emulating()


def test_a_copied_answer_holds_nothing():
    with cuda_autocast():
        answer = emulation._Answer()
        assert copy.deepcopy(answer) is True and copy.copy(answer) is True
        assert pickle.loads(pickle.dumps(answer)) is True
        emulation._Answer.__new__(emulation._Answer).__del__()
        count = emulation._INSTALLATION._count
        del answer
        assert emulation._INSTALLATION._count == count - 1
    assert not emulation.is_emulating()


@pytest.mark.filterwarnings('ignore')
def test_compiled_functions():
    linear = torch.nn.Linear(3, 3)

    @torch.compile(backend='eager')
    def doubled(x):
        return linear(x) if torch.is_autocast_enabled() else linear(x) * 2

    x = torch.rand(2, 3)
    for _ in range(2):
        with cuda_autocast():
            assert torch.compile(linear, backend='eager')(x).dtype == (
                torch.float16)
            assert torch.equal(doubled(x), linear(x))
        assert emulation._INSTALLATION._count == 0
        assert torch.allclose(doubled(x), linear(x) * 2)


def test_cudas_default_dtype_and_any_dtype():
    x = torch.rand(2, 2)
    with emulation.installed():
        assert cudas_autocast_dtype() == torch.float16
        with torch.autocast('cuda'):
            assert product() == torch.float16
    with cuda_autocast(torch.bfloat16):
        assert cudas_autocast_dtype() == torch.bfloat16
        with torch.autocast('cuda', dtype=torch.float32):
            assert F.linear(x.half(), x).dtype == torch.float32
