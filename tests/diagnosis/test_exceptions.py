from __future__ import annotations

import math
import traceback
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.annotations import GOOD, sample
from helpers.guards import parts_of
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mmdet_nanfix.diagnosis import diagnostician
from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.guard.state import Rng


class Raiser(nn.Module):
    """Raises in the way that it is told to."""

    num_classes = 3

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs, data_samples=None):
        x = self.linear(inputs)
        return getattr(self, self.how)(x, data_samples)

    def matching(self, x, samples):
        return linear_sum_assignment(x.detach().numpy())

    def bce(self, x, samples):
        with torch.autocast('cpu', enabled=False):
            return F.binary_cross_entropy(x.float().sigmoid(),
                                          torch.zeros(2, 2))

    def to_int(self, x, samples):
        return int(x.sum())

    def one_hot(self, x, samples):
        labels = torch.cat([s.gt_instances.labels for s in samples])
        return F.one_hot(labels, 3)

    def index(self, x, samples):
        return torch.zeros(3)[samples[0].gt_instances.labels]

    def asserting(self, x, samples):
        assert not torch.isnan(x).any()

    def boxes(self, x, samples):
        for item in samples:
            box = item.gt_instances.bboxes
            if (box[:, 2] <= box[:, 0]).any():
                raise ValueError('empty box')

    def typo(self, x, samples):
        x.masked_fill(x > 0, -math.inf)
        return x.no_such_thing

    def own_check(self, x, samples):
        raise ValueError('a user wrote this')

    def too_few(self, x, samples):
        scores = x.masked_fill(torch.ones_like(x).bool(), -math.inf)
        filled = torch.full((2, 2), -math.inf)
        if ((scores + filled) > -math.inf).sum() < 2:
            raise ValueError('fewer valid proposals than asked for')

    def counting(self, x, samples):
        if len(samples[0].gt_instances) == 2:
            raise ValueError('a bug with two boxes')

    def no_memory(self, x, samples):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')


def explained(error, model, forward, args, kwargs, rng=None):
    return diagnostician(parts_of(model)).catch(
        error, model, forward, args, kwargs, rng or Rng())


def reason(how, inputs, samples=None, autocast=False):
    model = Raiser(how)

    def forward(*args, **kwargs):
        if autocast:
            with cuda_autocast():
                return Raiser.forward(model, *args, **kwargs)
        return Raiser.forward(model, *args, **kwargs)

    args, kwargs = (inputs, ), dict(data_samples=samples)
    rng = Rng()
    try:
        forward(*args, **kwargs)
    except Exception as error:
        return explained(error, model, forward, args, kwargs, rng)
    raise AssertionError('it did not raise')


BAD = torch.full((2, 2), math.nan)
FINE = torch.ones(2, 2)


@pytest.mark.parametrize('how', ['matching', 'bce', 'to_int', 'asserting'])
@pytest.mark.parametrize('autocast', [False, True])
def test_non_finite_numbers(how, autocast):
    raised = reason(how, BAD, autocast=autocast)
    assert raised.details.bad == []
    assert raised.kind in ('ValueError', 'RuntimeError', 'AssertionError')
    assert raised.text.startswith(f'{raised.kind}: ')
    assert raised.details.site.source.startswith(__file__)
    assert '\n' not in raised.text


@pytest.mark.parametrize('how, box, label', [
    ('one_hot', GOOD, 3), ('one_hot', GOOD, -1), ('index', GOOD, 7),
    ('boxes', [1., 1., 1., 5.], 0)])
def test_a_bad_annotation(how, box, label):
    raised = reason(how, FINE, [sample([GOOD, box], [0, label])])
    assert [(bad.sample, bad.index) for bad in raised.details.bad] == [(0, 1)]


@pytest.mark.parametrize('how, inputs', [
    ('typo', FINE), ('typo', BAD), ('own_check', FINE), ('own_check', BAD),
    ('too_few', FINE), ('too_few', BAD), ('counting', FINE),
    ('no_memory', BAD)])
def test_another_cause(how, inputs):
    assert reason(how, inputs, [sample([GOOD, [1., 1., 1., 5.]])]) is None


@pytest.mark.parametrize('spoil', ['lock', 'graph', 'unlabelled'])
def test_what_cannot_be_tried_has_no_known_cause(spoil):
    """The user's own exception is what counts."""
    import threading
    samples = [sample([GOOD, [1., 1., 1., 5.]])]
    if spoil == 'lock':
        samples[0].extra = threading.Lock()
    elif spoil == 'graph':
        samples[0].extra = torch.ones(1, requires_grad=True) * 2
    else:
        samples[0].gt_instances.pop('labels')
    found = reason('typo', BAD, samples)
    assert found is None


def test_what_does_not_come_again_has_no_known_cause():
    calls = []

    def once(x):
        calls.append(x)
        if len(calls) == 1:
            raise ValueError('once')

    with pytest.raises(ValueError) as caught:
        once(FINE)
    assert explained(caught.value, nn.Linear(1, 1), once, (FINE, ), {}) is None


def test_the_module_and_the_source_are_named():
    inner = Raiser('matching')

    class Outer(nn.Module):

        def __init__(self):
            super().__init__()
            self.bbox_head = inner

        def forward(self, x):
            return self.bbox_head(x)

    model = Outer()
    try:
        model(BAD)
    except ValueError as error:
        raised = explained(error, model, model.forward, (BAD, ), {})
    assert raised.details.site.module == 'bbox_head'
    assert raised.details.op is None
    assert raised.details.site.function == 'matching'
    line = int(raised.details.site.source.rpartition(':')[2])
    with open(__file__) as file:
        assert 'linear_sum_assignment(x' in file.readlines()[line - 1]


def test_a_trial_that_itself_fails_does_not_acquit():
    """Another exception under the probe is no proof."""

    def own(x):
        if _get_current_dispatch_mode() is not None:
            raise NotImplementedError('a mode cannot run this')
        raise KeyError('a bug')

    with pytest.raises(KeyError) as caught:
        own(FINE)
    assert explained(caught.value, nn.Linear(1, 1), own, (FINE, ), {}) is None


def test_two_causes_in_one_batch():
    class Both(Raiser):

        def one_hot(self, x, samples):
            super().one_hot(x, samples)
            return linear_sum_assignment(x.detach().numpy())

    model = Both('one_hot')
    samples = [sample([GOOD, GOOD], [0, 7])]
    with pytest.raises(RuntimeError) as caught:
        model(BAD, data_samples=samples)
    raised = explained(caught.value, model, model.forward, (BAD, ),
                       dict(data_samples=samples))
    assert [bad.index for bad in raised.details.bad] == [1]


@pytest.mark.parametrize('inputs', [BAD, FINE])
def test_the_activations_of_the_failed_forward_are_let_go(inputs):
    """Else each replay would need the memory of two forwards."""
    made, alive = [], []

    class Holding(nn.Linear):

        def forward(self, x):
            alive.append(any(ref() is not None for ref in made))
            activations = super().forward(x)
            made.append(weakref.ref(activations))
            if not alive[0] and not (activations * 0 == 0).all():
                raise ValueError('not finite') from self.cause()
            if inputs is FINE:
                raise KeyError('a bug')
            return activations

        def cause(self):
            try:
                held = torch.ones(2)
                made.append(weakref.ref(held))
                raise RuntimeError
            except RuntimeError as error:
                return error

    model = Holding(2, 2)
    with pytest.raises(Exception) as caught:
        model(inputs)
    error = caught.value
    caught = explained(error, model, model.forward, (inputs, ), {})
    assert (caught is None) is (inputs is FINE)
    assert len(alive) >= 3 and not any(alive[1:])
    if inputs is FINE:
        # A debugger finds what it looks for.
        frames = [frame for frame, _ in traceback.walk_tb(
            error.__traceback__)]
        assert frames[-1].f_locals['activations'].shape == (2, 2)
        assert 'explain' not in {frame.f_code.co_name for frame in frames}
