from __future__ import annotations

import math

import pytest
import torch
from helpers.batches import batch, boxes
from helpers.guards import parts_of
from helpers.replays import failing as first_of
from helpers.replays import play
from torch import nn

from mmdet_nanfix.diagnosis.context import RunContext
from mmdet_nanfix.diagnosis.findings import Findings, ReplayResult
from mmdet_nanfix.diagnosis.investigate import Investigator
from mmdet_nanfix.diagnosis.parts import ModelParts
from mmdet_nanfix.diagnosis.replay.batch_view import BatchView
from mmdet_nanfix.diagnosis.replay.driver import MOST
from mmdet_nanfix.diagnosis.replay.op_record import CallSite, OpRecord

HALF = dict(half=True, fp32='heads', scale=1024.)


class Detector(nn.Module):
    num_classes = 3

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1)


def walk(answer, first, made=None, raised=None, **context):
    """Play the part of the replays.

    Args:
        answer: Takes a request, returns what fails, or a result.
        first: Result of the first replay.
    """
    model, found = Detector(), Findings()
    search = Investigator(parts_of(model), ModelParts(model)).search(
        BatchView(made or batch(1)), None, RunContext(**context), found,
        raised)
    requests = play(search, first, answer)
    assert len(requests) < MOST
    return found, requests


def origin(in_loss=False, **settings):
    return OpRecord(0, 'op', CallSite(module='head', in_loss=in_loss),
                    **settings)


def failing(how, in_loss=False, **settings):
    return first_of(how, origin(in_loss), **settings)


def shown(found):
    return {name: experiment.cured
            for name, experiment in found.experiments.items()}


def overflow(limit, norm=2.):
    """Gradients that fill half's range at a scale of ``limit``."""

    def answer(request):
        scale = request.scale or 1024.
        if scale > limit:
            return 'grads'
        return ReplayResult(None, norm=norm, filled=(
            scale / limit if request.gauge else None))

    return answer


@pytest.mark.parametrize('limit, fits', [(600., 512.), (512.1, 512.),
                                         (511., 256.), (3., 2.), (1.5, 1.)])
def test_the_scale_that_fits_is_the_highest(limit, fits):
    found, requests = walk(overflow(limit), failing('grads'), **HALF)
    assert found.fits == fits and found.norm == 2.
    assert shown(found) == {'first': False, 'lower scale': True,
                            'again': False}
    # Nothing was accepted before: it is tried, and no image is blamed.
    assert [request.scale for request in requests] == [1., fits, None]
    assert f'at loss scale {fits:g}' in found.experiments['lower scale'].words


def test_a_step_that_is_made_again_needs_no_trial_of_its_scale():
    found, requests = walk(overflow(100.), failing('grads'), **HALF,
                           sane=lambda norm: True, can_retry=True)
    assert found.fits == 64. and len(requests) == 1


def test_of_a_scale_that_was_measured_wrong_the_lowest_is_told():
    def answer(request):
        if request.scale == 1.:
            return ReplayResult(None, norm=1., filled=1 / 600)
        return 'grads'

    found, _ = walk(answer, failing('grads'), **HALF)
    assert found.fits == 1.
    assert 'at loss scale 1 it does not come, at 512 it does' in (
        found.experiments['lower scale'].words)


def test_an_absurd_gradient_is_looked_into_further():
    made = batch(2)
    found, requests = walk(overflow(100.), failing('grads'), made, **HALF,
                           sane=lambda norm: False, can_retry=True)
    assert found.experiments['lower scale'].cured
    assert any(request.batch is not None for request in requests)


def test_no_scale_fits_but_the_part_in_fp32():
    def answer(request):
        return ReplayResult(None, norm=1.) if request.precision else 'grads'

    found, requests = walk(answer, failing('grads'), **HALF)
    assert found.part == 'head' and 'part in fp32' in found.proven
    assert shown(found) == {'first': False, 'lower scale': False,
                            'part in fp32': True, 'again': False}


def test_a_scale_at_its_floor_is_not_lowered():
    found, requests = walk(lambda request: 'grads', failing('grads'),
                           **{**HALF, 'scale': 1.})
    assert 'lower scale' not in found.experiments
    assert all(request.scale is None for request in requests)


def losses(**values):
    return failing('grads', losses=values)


def test_a_term_that_drowns_all_others_is_lowered():
    def answer(request):
        return ReplayResult(None, norm=1.) if request.factors else 'grads'

    found, requests = walk(answer, losses(loss_cls=7e6, loss_bbox=.5,
                                          loss_rpn=.5), **HALF)
    assert found.term == ('loss_cls', 1e-7)
    assert shown(found) == {'first': False, 'term lowered': True,
                            'again': False}
    assert dict(requests[0].factors) == {'loss_cls': 1e-7}


def test_a_term_that_is_no_help_is_told_and_the_scale_is_tried():
    found, _ = walk(overflow(100.), losses(loss_cls=7e6, loss_bbox=1.),
                    **HALF)
    assert shown(found)['term lowered'] is False
    assert shown(found)['lower scale'] is True and found.term is None


@pytest.mark.parametrize('values', [
    dict(loss_cls=7e6), dict(loss_cls=500., loss_bbox=1.), {},
    dict(loss_cls=0., loss_bbox=0.), dict(loss_cls=7e6, loss_bbox=0.),
    # Hardly any positives: the others are small, this one is not large.
    dict(loss_cls=1.1, loss_bbox=1e-4)])
def test_a_term_that_does_not_is_left_alone(values):
    found, _ = walk(overflow(100.), losses(**values), **HALF)
    assert 'term lowered' not in found.experiments


@pytest.mark.parametrize('usual, blamed', [
    (None, True), (1., True), (6e5, True), (5e6, False)])
def test_a_term_that_was_always_so_is_left_alone(usual, blamed):
    def answer(request):
        return ReplayResult(None, norm=1.) if request.factors else 'grads'

    found, _ = walk(answer, losses(loss_cls=7e6, loss_bbox=1.), **HALF,
                    usual_loss={'loss_cls': usual}.get)
    assert (found.term is not None) is blamed


def helped_by(*precision, how='loss'):
    """Fails but where one of these is in fp32."""

    def answer(request):
        helped = set(request.precision) & set(precision)
        return ReplayResult(None, norm=1.) if helped else how

    return answer


@pytest.mark.parametrize('fp32, in_loss, helps, wanted', [
    (None, True, 'losses', {'losses in fp32': True}),
    (None, True, 'heads', {'losses in fp32': False, 'heads in fp32': True}),
    ('losses', True, 'heads', {'heads in fp32': True}),
    ('heads', True, 'head', {'part in fp32': True}),
    (None, False, 'head', {'part in fp32': True}),
    ('heads', False, 'all', {'part in fp32': False, 'all in fp32': True,
                             'bfloat16': False}),
    ('heads', False, None, {'part in fp32': False, 'all in fp32': False}),
])
def test_precision_is_tried_from_the_least_on(fp32, in_loss, helps, wanted):
    found, _ = walk(helped_by(helps), failing('loss', in_loss),
                    **{**HALF, 'fp32': fp32})
    control = {'again': False} if any(wanted.values()) else {}
    assert shown(found) == {'first': False, **wanted, **control}
    assert (found.part == 'head') is (helps == 'head')
    assert found.mode == (helps if helps in ('losses', 'heads') else None)


def test_bfloat16_is_tried_where_a_part_is_not_enough():
    found, _ = walk(helped_by('all', 'bfloat16'), failing('loss'), **HALF)
    assert shown(found)['bfloat16'] and 'bfloat16' in found.proven


def test_a_part_in_fp32_and_a_lower_scale():
    def answer(request):
        if not request.precision:
            return 'loss'
        scale = request.scale or 1024.
        return 'grads' if scale > 10. else ReplayResult(
            None, norm=3., filled=scale / 10. if request.gauge else None)

    found, _ = walk(answer, failing('loss'), **HALF)
    assert found.part == 'head' and found.fits == 8. and found.norm == 3.
    assert 'with head in fp32 and loss scale 8 it does not come' in (
        found.experiments['part in fp32'].words)


def test_a_part_that_helps_no_further_than_the_loss():
    def answer(request):
        return 'grads' if request.precision else 'loss'

    found, _ = walk(answer, failing('loss'), **HALF)
    assert found.part == 'head' and not found.proven
    assert 'but then gradients are bad' in (
        found.experiments['part in fp32'].words)


def test_full_precision_needs_no_replay_to_be_told():
    found, requests = walk(lambda request: 'loss', failing('loss'))
    assert shown(found) == {'first': False, 'all in fp32': False}
    assert not requests


def test_in_full_precision_the_formulas_of_the_losses_are_tried():
    found, _ = walk(helped_by('losses'), failing('loss', in_loss=True))
    assert 'losses mended' in found.proven


@pytest.mark.parametrize('again, cured', [(None, True), ('loss', False)])
def test_what_does_not_come_is_replayed_once_more(again, cured):
    found, requests = walk(lambda request: again, ReplayResult(None), **HALF)
    assert shown(found) == {'first': True, 'again': cured}
    assert len(requests) == 1


def test_what_is_given_is_not_experimented_on():
    for kind in ('weight', 'buffer'):
        found, requests = walk(lambda request: None, first_of(
            'loss', origin(given=(kind, 'head.weight'))), **HALF)
        assert not requests and shown(found) == {'first': False}
        assert f'the {kind} head.weight' in found.experiments['first'].words


def test_an_annotation_that_is_repaired_is_enough():
    made = batch(2)
    boxes(made, 1).zero_()

    def answer(request):
        return None if request.batch is not None else 'loss'

    found, requests = walk(answer, failing('loss', True), made, **HALF)
    assert shown(found) == {'first': False, 'annotation repaired': True,
                            'again': False}
    assert not any(request.precision for request in requests)


def test_pixels_that_are_too_large_are_clipped():
    made = batch(2)
    made['inputs'] = [image.float() for image in made['inputs']]
    made['inputs'][1].fill_(1e6)

    def answer(request):
        pixels = (request.batch or made)['inputs']
        return 'loss' if max(image.max() for image in pixels) > 255 else None

    found, _ = walk(answer, failing('loss'), made, **HALF)
    assert shown(found)['pixels repaired'] is True
    assert found.images[0]['img_path'] == '1.jpg'


class Normaliser:

    def __init__(self, std):
        self.std = torch.tensor(std).view(3, 1, 1)


@pytest.mark.parametrize('brightest, unit', [(255, 1.), (1, 255.)])
@pytest.mark.parametrize('std', [0., 1e-5])
def test_a_normalization_that_does_not_fit(brightest, unit, std):
    made = batch(2)
    made['inputs'] = [torch.full((3, 4, 4), float(brightest))] * 2

    def answer(request):
        return ReplayResult(None, norm=1.) if request.normalised else 'loss'

    found, _ = walk(answer, failing('loss'), made, **HALF,
                    normaliser=Normaliser([std] * 3))
    assert shown(found)['normalised'] and 'normalised' in found.proven
    assert math.isclose(found.normalised[1][0], 58.395 / unit, rel_tol=1e-3)


def test_a_normalization_that_fits_is_not_tried():
    found, _ = walk(lambda request: 'loss', failing('loss'), batch(2),
                    **HALF, normaliser=Normaliser([58.] * 3))
    assert 'normalised' not in found.experiments


def test_with_others_only_the_scale_is_tried():
    found, requests = walk(overflow(100.), failing('grads'), batch(2),
                           **HALF, alone=False)
    assert [request.scale for request in requests] == [1.]
    found, requests = walk(lambda request: None, failing('loss'), batch(2),
                           **HALF, alone=False)
    assert not requests and shown(found) == {'first': False}


def test_others_that_can_be_asked_try_more_precision():
    settings = {**HALF, 'alone': False, 'together': True}
    made = batch(2)
    boxes(made, 1).zero_()
    found, requests = walk(helped_by('head'), failing('loss'), made,
                           **settings)
    assert shown(found) == {'first': False, 'part in fp32': True,
                            'again': False}
    assert all(request.batch is None for request in requests)


def test_a_replay_that_cannot_be_made_shows_nothing():
    found, _ = walk(lambda request: ReplayResult(error='ran out of memory'),
                    failing('loss'), **HALF)
    assert shown(found) == {'first': False}
    assert 'part in fp32: not made, the replay ran out of memory' in (
        found.tests)


def test_what_a_part_in_fp32_helps_is_no_images_fault():
    found, requests = walk(helped_by('head'), failing('loss'), batch(2),
                           **HALF)
    assert found.part == 'head' and found.images is None
    assert all(request.batch is None for request in requests)
    # Unless something in the batch looks bad: then that is tried first.
    made = batch(2)
    boxes(made, 1).zero_()
    found, requests = walk(helped_by('head'), failing('loss'), made, **HALF)
    assert requests[0].batch is not None and found.part == 'head'


@pytest.mark.parametrize('helps, proven', [('head', True), ('nothing', False)])
def test_what_raised_is_proven_by_a_part_in_fp32_or_by_a_trial(helps, proven):
    def answer(request):
        if request.mended or helps in request.precision:
            return ReplayResult(None, norm=1.)
        return first_of('raised')

    found, requests = walk(answer, failing('raised'), batch(2),
                           raised='E', **HALF)
    assert found.origin is not None
    assert any(request.mended for request in requests) is not proven
    # An origin that nothing proves is none.
    found, _ = walk(lambda request: first_of('raised'), failing('raised'),
                    batch(2), raised='E', **HALF)
    assert found.origin is None
