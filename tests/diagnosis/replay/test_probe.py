from __future__ import annotations

import math
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmdet_nanfix.diagnosis.replay.call_site import CallSites
from mmdet_nanfix.diagnosis.replay.op_record import describe
from mmdet_nanfix.diagnosis.replay.probe import NonFiniteTracer
from mmdet_nanfix.emulation import computing, cuda_autocast
from mmdet_nanfix.guard.checks import is_finite
from mmdet_nanfix.torch_support import Patches

ZERO = torch.zeros(3)
ONE = torch.ones(3)


def tracer(given=(), meant=(), mended=(), model=None):
    """It names the half operations that are emulated."""
    return NonFiniteTracer(CallSites(model or nn.Linear(1, 1)), computing,
                           given, meant, mended)


def follow(compute, given=(), meant=(), mended=()):
    """Origins that reach the result of a function."""
    probe = tracer(given, meant, mended)
    with probe:
        result = compute()
    return probe.origins([result]), result


def names(compute, **kwargs):
    return [record.op for record in follow(compute, **kwargs)[0]]


def garbage():
    buffer = torch.empty(3)
    buffer.set_(torch.full((3, ), math.nan).untyped_storage())
    return buffer


def partly(value):
    out = torch.ones(4)
    out[1:2] = value
    return out


def parts():
    out = torch.ones(1).new_zeros(3)
    out[0] = ZERO[0].log()
    out[1] = (ONE[0] * 1000).exp()
    return out


def inplace():
    x = torch.ones(3)
    x.mul_(1e38)
    x.mul_(1e38)
    return x.sum()


def attention(masked):
    scores = torch.ones(2, 4).masked_fill(masked, -math.inf)
    return scores.softmax(-1).sum()


SOME = torch.tensor([[True, False, False, True]] * 2)
ALL = torch.ones(2, 4, dtype=torch.bool)


@pytest.mark.parametrize('compute, found', [
    (lambda: ZERO.log().sum(), ['log']),
    (lambda: (ONE * 3e38 * 10).mean(), ['mul']),
    (lambda: (ZERO / ZERO).sum(), ['div']),
    (lambda: ONE[:0].mean(), ['mean']),
    (lambda: (ONE - 2).sqrt().sum(), ['sqrt']),
    (inplace, ['mul_']),
    # Views, copies and what is made of them pass it on.
    (lambda: ZERO.log().view(3, 1).t().clone()[0, 1] * 2, ['log']),
    (lambda: torch.cat([ONE, ZERO.log()]).sum(), ['log']),
    (lambda: partly((ZERO[:1]).log()).sum(), ['log']),
    # What is absorbed or not used is not blamed.
    (lambda: torch.where(ZERO > 0, ZERO.log(), ONE).sum(), []),
    (lambda: ZERO.log().clamp(min=-1).sum(), []),
    (lambda: (ZERO.log(), ONE.sum())[1], []),
    (lambda: (ONE * 1e38 * 1e38).sqrt().clamp(max=3).sum(), []),
    (lambda: attention(SOME), []),
    (lambda: torch.stack([torch.tensor(math.inf), ONE[0]]).min(), []),
    (lambda: torch.full((3, ), math.inf).minimum(ONE).sum(), []),
    # An infinity on purpose that turns into a NaN is no purpose.
    (lambda: attention(ALL), ['_softmax']),
    (lambda: torch.full((3, ), math.inf).sub(
        torch.full((3, ), math.inf)).sum(), ['sub']),
    # One on purpose that reaches the loss is named for want of another.
    (lambda: torch.full((3, ), math.inf).sum(), ['full']),
    (lambda: torch.full((3, ), math.inf).sum() + ZERO.log().sum(), ['log']),
    # A constant is on purpose too, and so is what follows from it.
    (lambda: torch.minimum(torch.full((3, ), 1.) * torch.tensor(math.inf),
                           ZERO / ZERO).sum(), ['div']),
    (lambda: torch.where(torch.arange(3.) > 5, torch.tensor(0.),
                         torch.tensor(-math.inf)).softmax(0).sum(),
     ['_softmax']),
    # Parts of one memory.
    (lambda: parts()[0], ['log']),
    (lambda: parts()[1], ['exp']),
    (lambda: parts().sum(), ['log', 'exp']),
    (lambda: parts()[2], []),
    (lambda: torch.div(ZERO, ZERO, out=ZERO.log()).sum(), ['div']),
    # Through complex numbers.
    (lambda: torch.fft.rfft(ZERO.log()).mul(2).abs().sum(), ['log']),
    # Two of them, in their order.
    (lambda: ZERO.log().sum() + (ZERO / ZERO).sum(), ['log', 'div']),
])
def test_what_reached_the_result(compute, found):
    assert names(compute) == found


def test_memory_that_nobody_has_written_is_nobodys_fault():
    def compute():
        out = torch.empty(3)
        out.fill_(1.)
        other = torch.empty_like(out)
        other.copy_(out)
        return other.sum()

    assert names(compute) == []


def test_the_same_memory_bad_fine_and_bad_again():
    def compute():
        x = torch.ones(3)
        x.log_().log_()
        x.fill_(1.)
        return x.sub_(1.).reciprocal_().sum()

    assert names(compute) == ['reciprocal_']


def test_a_write_beside_something_bad_is_an_origin_of_its_own():
    def compute():
        x = torch.ones(2)
        x[0] = (ZERO[0]).log()
        x[1:].sub_(1.).log_()
        return x[1]

    assert names(compute) == ['log_']


def test_values_of_inputs_and_result():
    (record, ), _ = follow(lambda: (torch.tensor([2., 0., -1.])).log())
    assert record.inputs == [{
        'shape': [3], 'dtype': 'float32', 'amax': 2., 'nan': 0, 'inf': 0,
        '-inf': 0}]
    assert (record.outputs[0]['nan'], record.outputs[0]['-inf']) == (1, 1)
    assert record.site.source.startswith(__file__)
    assert describe(torch.tensor([math.nan]))['amax'] is None


def test_rows_tell_the_image():
    def compute():
        x = torch.ones(3, 2, 2)
        x[1] = 0
        return 1 / x

    (record, ), _ = follow(compute)
    assert record.rows == ([1], 3)


def test_what_was_given():
    x = torch.tensor([1., math.nan])
    (record, ), _ = follow(lambda: (x * 2).sum(),
                           given=[('weight', 'a.weight', x)])
    assert record.given == ('weight', 'a.weight')
    mask = torch.tensor([0., -math.inf])
    assert names(lambda: (ONE[:2] + mask).softmax(0).sum(),
                 meant=[mask]) == []


def test_what_numpy_has_made_is_named_by_where_it_comes_in():
    def compute():
        return torch.from_numpy(np.array([1., np.nan])).sum()

    (record, ), _ = follow(compute)
    assert record.op.endswith('test_probe.compute')


def test_a_compiled_function_is_an_operation():
    class Compiled:
        """Writes where no dispatcher looks."""

    def write(source, out):
        out.numpy()[:] = 1 / source.numpy()

    module = type(math)('compiled')
    module.write = write
    probe = tracer()
    for source, found in ((ZERO, ['write']), (ZERO.log(), [])):
        out = torch.ones(3)
        with np.errstate(divide='ignore'), probe.following([module]):
            module.write(source, out)
            result = out.sum()
        assert [r.op for r in probe.origins([result])] == found
    assert module.write is write


@pytest.mark.parametrize('ends', ['inside', 'after'])
@pytest.mark.parametrize('begins', ['before', 'inside'])
def test_what_others_replace_meanwhile_is_put_back(begins, ends):
    module = types.SimpleNamespace(compiled=abs)
    others = Patches('others', innermost=True)

    def replace():
        others.wrap(module, 'compiled', lambda function: (
            lambda value: function(value) + 1))

    if begins == 'before':
        replace()
    probe = tracer()
    with probe.following([module]):
        if begins == 'inside':
            replace()
        assert module.compiled(-2) == 3
        if ends == 'inside':
            others.undo()
            assert module.compiled(-2) == 2
    assert module.compiled(-2) == (2 if ends == 'inside' else 3)
    others.undo()
    assert module.compiled is abs


def test_mending_an_origin_shows_that_it_was_it():
    def compute():
        unused = ZERO.log()
        return (ZERO / ZERO).sum() + torch.where(ONE > 0, ONE, unused).sum()

    (record, ), result = follow(compute)
    assert not is_finite(result)
    _, result = follow(compute, mended=[(record.op, record.site.source)])
    assert result == 3


def sliced(x):
    y = x.clone()
    y[:1].sqrt_()
    return y


def backward(compute, leaf, scale=1.):
    probe = tracer()
    with probe:
        loss = compute(leaf)
        assert is_finite(loss.detach())
        (loss * scale).backward()
    return probe.origins([leaf.grad])


@pytest.mark.parametrize('compute, found', [
    (lambda x: x.sqrt().sum(), ['sqrt']),
    (lambda x: x.norm(), []),
    (lambda x: x.pow(.5).sum(), ['pow']),
    (lambda x: (x * 2).abs().pow(.25).sum() + x.sum(), ['pow']),
    (lambda x: sliced(x).sum(), ['sqrt_']),
    # Bad in the forward, hidden from the loss, back in the gradient.
    (lambda x: torch.where(x > 0, 1 / x, x).sum(), ['reciprocal']),
])
def test_backward_origins_are_forward_operations(compute, found):
    records = backward(compute, torch.zeros(3, requires_grad=True))
    assert [record.op for record in records] == found
    assert all(record.site.source.startswith(__file__)
               for record in records)


def test_an_autograd_function_has_its_name():
    class Halves(torch.autograd.Function):

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1e38 * 1e38

    (record, ) = backward(lambda x: Halves.apply(x).sum(),
                          torch.ones(3, requires_grad=True))
    assert record.op == 'Halves' and record.backward


def test_a_checkpointed_forward_is_a_forward():
    from torch.utils.checkpoint import checkpoint
    for reentrant in (False, True):
        (record, ) = backward(
            lambda x, r=reentrant: checkpoint(
                lambda y: y.sqrt().sum(), x, use_reentrant=r),
            torch.zeros(3, requires_grad=True))
        assert record.op == 'sqrt'
        assert record.site.source.startswith(__file__)


def test_emulated_half_is_named_as_a_gpu_would():
    x = torch.full((1, 4), 300.)
    w = torch.full((2, 4), 300.)

    def compute():
        with cuda_autocast():
            return F.linear(x, w).float().sum()

    (record, ), _ = follow(compute)
    assert record.op == 'linear'
    # What went in are its halves, not what it is made of here.
    assert [item['dtype'] for item in record.inputs] == ['float16'] * 2
    assert record.outputs[0]['inf'] == 2

    def cast():
        with cuda_autocast():
            return F.linear(x * 1e3, w * 1e-9).float().sum()

    assert names(cast) == ['_to_copy']


def test_a_gradient_that_overflows_in_half():
    w = torch.ones(2, 4, requires_grad=True)
    x = torch.ones(1, 4)

    def compute(w):
        with cuda_autocast():
            return F.linear(x, w).float().sum() * 1e-3

    (record, ) = backward(compute, w, scale=1e9)
    # Its own gradient is cast to half in front of the linear's.
    assert record.backward and record.op == '_to_copy'


def test_statistics_that_a_schema_says_nothing_of():
    norm = nn.BatchNorm1d(2)
    probe = tracer(model=norm)
    with probe:
        norm(torch.tensor([[1e30, 1.], [-1e30, 2.]]))
    (record, ) = probe.origins([norm.running_var])
    assert record.op in ('native_batch_norm', '_native_batch_norm_legit')


def test_nothing_is_kept_alive():
    import weakref
    probe = tracer()
    with probe:
        x = ZERO.log()
        storage = weakref.ref(x.untyped_storage())
        del x
    assert storage() is None


def test_a_hook_on_a_gradient_is_somebodys_code():
    def compute(x):
        y = x * 2
        y.register_hook(lambda grad: grad / 0)
        return y.sum()

    (record, ) = backward(compute, torch.ones(3, requires_grad=True))
    assert record.op == 'div' and record.site.source.startswith(__file__)


def test_a_kind_of_parameter_of_somebodys():
    class Own(nn.Parameter):
        pass

    weight = Own(torch.tensor([1., math.inf]))
    (record, ) = follow(lambda: (weight * 2).detach().sum(),
                        given=[('weight', 'a', weight)])[0]
    assert record.given == ('weight', 'a')


def test_what_passes_something_bad_on_is_not_mended():
    """At one line, an origin and what follows from another."""
    def compute():
        results = [x.sqrt() for x in (ZERO.log() * 0, ONE - 2)]
        return results[0].sum() + results[1].sum()

    records, _ = follow(compute)
    assert [record.op for record in records] == ['log', 'sqrt']
    _, result = follow(compute, mended=[
        (records[1].op, records[1].site.source)])
    assert not is_finite(result)
    _, result = follow(compute, mended=[
        (record.op, record.site.source) for record in records])
    assert is_finite(result)


def mending_all():
    return NonFiniteTracer(CallSites(nn.Identity()), computing, mended=None)


def test_a_mask_survives_mending():
    x = torch.ones(2, 2)
    with mending_all():
        masked = x.masked_fill(torch.eye(2).bool(), -math.inf)
        assert masked.softmax(-1)[0].tolist() == [0., 1.]
        x.div_(torch.zeros(1))
        assert torch.isfinite(x).all()
        assert torch.isfinite(torch.empty(3).fill_(math.nan)).all()
        assert torch.zeros(1).expand(4).sum() == 0


def test_what_was_given_is_mended_where_it_is_used():
    weight = torch.tensor([math.nan, 1.])
    with mending_all():
        assert torch.isfinite(weight * 2).all()
        assert torch.isfinite(weight.sum() + 1)
        weight += 1
    assert torch.isfinite(weight).all()
