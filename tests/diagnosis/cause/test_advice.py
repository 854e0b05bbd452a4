from __future__ import annotations

import math

import pytest
from mmengine.config import Config

from mmdet_nanfix.diagnosis.cause.advice import Case, advise
from mmdet_nanfix.diagnosis.cause.config_patch import LossModules
from mmdet_nanfix.diagnosis.cause.symptoms import Symptom
from mmdet_nanfix.diagnosis.context import RunContext
from mmdet_nanfix.diagnosis.findings import (
    Counterfactual,
    Failure,
    Findings,
)
from mmdet_nanfix.incidents import Where
from mmdet_nanfix.incidents.codes import TITLES

WHERE = Where(phase='forward', head='rpn_head', module='rpn_head.rpn_conv',
              op='conv2d', source='/a/site-packages/mmdet/x.py:3')


def case(found=None, where=WHERE, bad=(), symptoms=None, losses=None,
         **context):
    """A case.

    Args:
        found: What replays have shown.
        where: Of the incident.
        bad: Names of symptoms that are a reason.
        symptoms: With words.
        losses: Modules that are named.
        **context: Of the run.
    """
    found = dict(found or {})
    found['proven'] = set(map(Counterfactual, found.get('proven', ())))
    return Case(
        Findings(failed=Failure.LOSS, **found), where,
        RunContext(**{'half': True, **context}),
        {**{name: Symptom(True, 'it is bad') for name in bad},
         **(symptoms or {})}, LossModules(**(losses or {})))


def config_of(patch, tmp_path, clip=''):
    (tmp_path / 'base.py').write_text(
        f"model = dict(a=1)\noptim_wrapper = dict(type='X',{clip} "
        "optimizer=dict(type='SGD', lr=1.))")
    (tmp_path / 'mine.py').write_text(f"_base_ = ['base.py']\n{patch}\n")
    return Config.fromfile(tmp_path / 'mine.py')


@pytest.mark.parametrize('code', sorted(TITLES))
def test_every_cause_has_words_and_a_patch_only_where_something_is_known(
        code):
    words, patch = advise(code, case(symptoms={
        'moments': Symptom(True, 'a is bad')}))
    assert words and words[-1] in '.:' and '\n' not in words
    if code == 'NF111':
        return
    assert patch is None


@pytest.mark.parametrize('start, name', [(64., 'max_scale'),
                                         (512., 'init_scale')])
def test_the_scale_that_fits(start, name, tmp_path):
    words, patch = advise('NF101', case(
        dict(fits=32.), scale=512., start=start, norm=3.))
    cfg = config_of(patch, tmp_path)
    assert cfg.optim_wrapper.nanfix == {name: 32.}
    # What was there stays.
    assert cfg.optim_wrapper.type == 'X' and '32' in words
    assert 'does not help' not in words


def test_a_part_in_fp32(tmp_path):
    found = dict(part='roi_head.bbox_head.1', proven={'part in fp32'})
    words, patch = advise('NF102', case(found, norm=3.))
    assert config_of(patch, tmp_path).optim_wrapper.nanfix == dict(
        fp32_modules=['roi_head.bbox_head.1'])
    assert 'A lower one' not in words and 'a lower one does not' in words
    assert 'eps of the optimizer' in words
    # With an absurd gradient its norm is bounded as well.
    words, patch = advise('NF102', case(
        {**found, 'fits': 8.}, norm=3.4, bad=['norm']))
    cfg = config_of(patch, tmp_path).optim_wrapper
    assert cfg.clip_grad == dict(max_norm=2., norm_type=2)
    assert cfg.nanfix.init_scale == 8. and 'not by value' in words
    words, patch = advise('NF102', case(dict(part='neck')))
    assert patch is None and 'fails later' in words


def test_bfloat16_where_a_part_is_not_enough(tmp_path):
    words, patch = advise('NF102', case(dict(proven={'bfloat16'})))
    assert config_of(patch, tmp_path).optim_wrapper.dtype == 'bfloat16'


def test_regions_and_the_fp32_form_of_a_loss(tmp_path):
    words, patch = advise('NF103', case(
        dict(mode='losses', proven={'losses in fp32'}),
        losses=dict(began='bbox_head.loss_cls', kind='FocalLoss')))
    assert "type='Fp32FocalLoss'" in words
    assert config_of(patch, tmp_path).optim_wrapper.nanfix.fp32 == 'losses'


def test_the_annotation_is_named_with_file_and_id():
    images = [dict(img_path='a.jpg', img_id=7, annotation=dict(
        index=3, what='box of zero size 0 x 4'))]
    for code in ('NF104', 'NF106'):
        words, patch = advise(code, case(dict(images=images)))
        assert 'annotation 3 of a.jpg (id 7): box of zero size' in words
        assert patch is None


def test_a_term_is_weighted_less(tmp_path):
    found = dict(term=('loss_mask', 1e-9), proven={'term lowered'})
    words, patch = advise('NF108', case(
        found, losses=dict(dominant='roi_head.mask_head.loss_mask',
                           weight=1e9)))
    cfg = config_of(patch, tmp_path)
    assert cfg.model.roi_head.mask_head.loss_mask.loss_weight == 1.
    # What is in a list has no place of its own in a config.
    words, patch = advise('NF108', case(
        found, losses=dict(dominant='roi_head.bbox_head.1.loss_cls',
                           weight=1e9), place=lambda name: None))
    assert patch is None and 'bbox_head.1.loss_cls.loss_weight' in words


def test_a_default_that_the_config_does_not_have_is_kept(tmp_path):
    _, patch = advise('NF108', case(
        dict(term=('loss_mask', 1e-3), proven={'term lowered'}),
        losses=dict(dominant='mask_head.loss_mask', weight=1e3),
        place=lambda name: (name, dict(type='L1Loss', loss_weight=1e3))))
    assert config_of(patch, tmp_path).model.mask_head.loss_mask == dict(
        type='L1Loss', loss_weight=1.)


def test_settings_of_the_hook_win(tmp_path):
    _, patch = advise('NF101', case(dict(fits=32.), scale=512., start=512.,
                                     by_hook=True))
    cfg = config_of(patch, tmp_path)
    assert cfg.default_hooks.nanfix == dict(
        type='NanGuardHook', init_scale=32.)
    assert 'nanfix' not in cfg.optim_wrapper
    _, patch = advise('NF102', case(
        dict(part='neck', proven={'part in fp32'}), norm=3., bad=['norm'],
        by_hook=True))
    cfg = config_of(patch, tmp_path)
    assert cfg.default_hooks.nanfix.fp32_modules == ['neck']
    assert cfg.optim_wrapper.clip_grad.max_norm == 2.


def test_a_learning_rate_and_the_norm(tmp_path):
    words, patch = advise('NF108', case(
        norm=123., safe_rate=.003, bad=['update']))
    cfg = config_of(patch, tmp_path).optim_wrapper
    assert cfg.optimizer == dict(type='SGD', lr=.003)
    assert cfg.clip_grad == dict(max_norm=100., norm_type=2)
    assert 'could not be tried' in words
    assert advise('NF108', case(norm=math.inf))[1] is None


@pytest.mark.parametrize('anew, clip', [
    (False, ''), (False, 'clip_grad=dict(max_norm=9.),'),
    (True, 'clip_grad=None,'),
    (True, "clip_grad=dict(type='value', clip_value=1.),")])
def test_a_clipping_merges_with_what_is_there(anew, clip, tmp_path):
    _, patch = advise('NF108', case(norm=3., clips_anew=anew))
    cfg = config_of(patch, tmp_path, clip)
    assert cfg.optim_wrapper.clip_grad == dict(max_norm=2., norm_type=2)


def test_pixels_and_their_normalization(tmp_path):
    values = [1., 2., 3.], [4., 5., 6.]
    words, patch = advise('NF105', case(
        dict(normalised=values, proven={'normalised'})))
    first = config_of(patch, tmp_path).model.data_preprocessor
    assert (first.mean, first.std) == values and '0-255' in words
    words, patch = advise('NF105', case(dict(images=[dict(
        img_path='a.jpg', img_id=1, annotation=None)])))
    assert 'a.jpg' in words and patch is None


def test_full_precision_says_what_is_no_cause(tmp_path):
    words, patch = advise('NF107', case())
    assert 'learning rate of 0' in words and 'mmdet/x.py:3' in words
    assert 'stride above the kernel size is no cause' in words
    words, _ = advise('NF107', case(where=Where(op='log')))
    assert 'stride' not in words and 'eps' in words
    words, patch = advise('NF107', case(
        dict(proven={'losses mended'}), losses=dict(
            began='bbox_head.loss_bbox', kind='IoULoss')))
    assert config_of(patch, tmp_path).model.bbox_head.loss_bbox.type == (
        'Fp32IoULoss')


@pytest.mark.parametrize('eps, lr', [(0., 1e-8), (1e-8, 1e-4)])
def test_an_eps_is_for_half_weights_or_none_at_all(eps, lr, tmp_path):
    words, patch = advise('NF111', case(
        eps=eps, symptoms={'moments': Symptom(False, 'fine')}))
    assert config_of(patch, tmp_path).optim_wrapper.optimizer.eps == lr


def test_spoiled_moments_have_no_setting():
    words, patch = advise('NF111', case(
        eps=1e-8, symptoms={'moments': Symptom(
            True, "Adam's exp_avg of x is not finite")}))
    assert patch is None and "Adam's exp_avg of x" in words
