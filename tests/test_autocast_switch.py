"""What torch answers of autocast while a CPU stands for a GPU."""
import threading

import pytest
import torch
import torch.nn.functional as F
from conftest import autocast_is_on, cudas_autocast_dtype, needs_half

from mmdet_nanfix import emulation
from mmdet_nanfix.autocast_switch import STATE, autocast_dtype
from mmdet_nanfix.emulation import cuda_autocast

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
