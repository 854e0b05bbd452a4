"""What torch answers of autocast while a CPU stands for a GPU."""
from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from helpers.torch_features import (
    autocast_is_on,
    cudas_autocast_dtype,
    needs_half,
)
from torch.utils.checkpoint import checkpoint

from mmdet_nanfix.emulation import autocast as emulation
from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.emulation.autocast_switch import STATE, autocast_dtype

pytestmark = needs_half
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def product():
    return F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype


def test_regions_of_both_names_within():
    """A host's region in half is taken, on a torch whose CPU refuses it."""
    with cuda_autocast(BRAIN):
        assert product() == autocast_dtype() == BRAIN
        with torch.autocast('cpu', HALF):
            assert product() == autocast_dtype() == HALF
            with torch.autocast('cuda', enabled=False):
                assert product() == SINGLE and not autocast_is_on()
                with torch.autocast('cpu', BRAIN):
                    assert product() == BRAIN and autocast_is_on('cuda')
            assert product() == cudas_autocast_dtype() == HALF
        assert product() == BRAIN
    assert product() == SINGLE and STATE.depth == STATE.regions == 0


@pytest.mark.parametrize('enabled', [True, False])
def test_a_region_of_torchs_own_around(enabled):
    with torch.autocast('cpu', BRAIN, enabled=enabled):
        before = product(), autocast_is_on()
        with cuda_autocast():
            assert product() == HALF and autocast_is_on()
        assert (product(), autocast_is_on()) == before == (
            BRAIN if enabled else SINGLE, enabled)
    assert not autocast_is_on()


def test_a_region_that_begins_before_and_ends_after():
    outer = torch.autocast('cpu', BRAIN)
    outer.__enter__()
    installed = emulation.installed()
    installed.__enter__()
    outer.__exit__(None, None, None)
    assert not autocast_is_on() and STATE.depth == 0
    installed.__exit__(None, None, None)
    assert product() == SINGLE


def test_half_without_autocast_within():
    """A GPU computes in half there; so do operations that a CPU has not."""
    x = torch.rand(1, 2, 8, 8).half()
    with cuda_autocast(), torch.autocast('cuda', enabled=False):
        for out in (F.max_pool2d(x, 2), x.softmax(1), F.batch_norm(
                x, torch.zeros(2), torch.ones(2)), F.linear(x, x[0, 0]),
                F.conv2d(x, x[:, :, :3, :3]), x.exp(), F.dropout(x),
                F.cross_entropy(x, x.softmax(1))):
            assert out.dtype == HALF
        # As on a GPU.
        with pytest.raises(RuntimeError, match='dtype'):
            F.linear(x, x[0, 0].float())
    with cuda_autocast():
        assert F.cross_entropy(x, x.softmax(1)).dtype == SINGLE


def test_threads_have_states_of_their_own():
    seen = []
    with cuda_autocast():
        thread = threading.Thread(
            target=lambda: seen.append((product(), autocast_is_on())))
        thread.start()
        thread.join()
    assert seen == [(SINGLE, False)]


def test_the_state_of_torchs_own_regions_counts():
    seen = []

    def other():
        with torch.autocast('cpu', BRAIN):
            inside.set()
            entered.wait(10)
            seen.append((product(), autocast_is_on()))

    inside, entered = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with cuda_autocast():
        entered.set()
        thread.join()
    with torch.autocast('cpu', BRAIN), emulation.installed():
        seen.append((product(), autocast_is_on()))
    assert seen == [(BRAIN, True)] * 2
    with emulation.installed():
        assert not autocast_is_on()


@pytest.mark.parametrize('use_reentrant', [True, False])
def test_a_checkpoint_in_a_disabled_region(use_reentrant):
    """What is computed again needs the half kernels, too."""
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    with cuda_autocast(), torch.autocast('cuda', enabled=False):
        out = checkpoint(lambda y: F.max_pool2d(y.half(), 2).exp(), x,
                         use_reentrant=use_reentrant)
    assert out.dtype == HALF
    out.sum().float().backward()
    assert x.grad.count_nonzero() == 4
    del out
    assert not emulation.is_emulating()


def test_a_registration_that_ends_in_a_disabled_region():
    x = torch.rand(2, 2, requires_grad=True)
    with cuda_autocast():
        loss = checkpoint(lambda y: F.linear(y, y), x,
                          use_reentrant=False).float().sum()
    with torch.autocast('cuda', enabled=False):
        loss.backward()
        del loss
        assert product() == SINGLE and not autocast_is_on()
    assert not autocast_is_on() and not emulation.is_emulating()


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_scripted_code():
    """It asks torch itself, whose CPU may only know bfloat16."""
    scripted = torch.jit.script(_product)
    x = torch.full((1, 1), 1 + 2**-10)
    for _ in range(3):
        with cuda_autocast():
            out = scripted(x)
            assert out.dtype == HALF and torch.equal(out, F.linear(x, x))
            with torch.autocast('cuda', enabled=False):
                assert scripted(x).dtype == SINGLE


def _product(x: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, x)
