"""A sample of the fault suite; ``python bench/faults/run.py`` runs it all."""
from __future__ import annotations

import glob
import os
import sys

import pytest
from helpers.paths import ROOT

FAULTS = os.path.join(ROOT, 'bench', 'faults')
sys.path.insert(0, FAULTS)
import run as faults  # noqa: E402

NAMES = sorted(os.path.basename(path)[:-3] for path in glob.glob(
    os.path.join(FAULTS, 'cases', '*.py')))
# One of each phase and of each kind of evidence, the quick ones.
SAMPLE = [
    'focal_gamma_retinanet', 'half_conv_rpn_faster_rcnn',
    'inf_momentum_rtmdet', 'large_label_yolox', 'masked_attention_detr',
    'nan_box_yolox', 'nan_pixel_faster_rcnn', 'nan_weight_rpn_faster_rcnn',
    'overflowing_statistics_retinanet', 'zero_height_box_ssdlite',
]
# With a patch of each kind.
FURTHER = ['focal_kernel_half_retinanet', 'learning_rate_yolov3',
           'scale_growth_retinanet', 'zero_std_fcos']


def case_of(name):
    return faults.load(os.path.join(FAULTS, 'cases', f'{name}.py'))


def test_the_suite_is_wide():
    cases = [case_of(name) for name in NAMES]
    assert len({case['family'] for case in cases}) >= 8
    assert len(NAMES) >= 40
    for case in cases:
        assert case['expect']['phase'] in (
            'input', 'forward', 'loss', 'backward', 'step', 'params',
            'buffers')


@pytest.mark.parametrize('name', SAMPLE)
def test_it_is_found(name):
    case = case_of(name)
    result = faults.run(case)
    assert all(ok is not False
               for ok in faults.score(case, result).values()), result
    assert result.incidents[0]['replay'] is None


@pytest.mark.parametrize('name', FURTHER)
def test_what_is_proposed_helps_and_nothing_is_left(name):
    case = case_of(name)
    result = faults.run(case, further=True)
    assert result.intact and result.survived and result.cured
    assert all(ok is not False
               for ok in faults.score(case, result).values()), result


def test_the_feature_level_is_told():
    (incident, ) = faults.run(case_of('half_scale_level_gfl')).incidents
    assert incident['where']['level'] == 1
    assert incident['where']['module'] == 'bbox_head.scales.1'


def test_the_score_can_fail():
    case = case_of('half_conv_rpn_faster_rcnn')
    expect = case['expect']
    right = dict(iter=case['step'], images=None, where=dict(
        head=expect['head'], phase=expect['phase'], op='conv2d',
        source='nowhere.py:1'))
    right.update(cause=dict(code='NF102'), action='skipped')
    result = faults.Result([right], intact=False)
    said = faults.score(case, result)
    assert said['cause'] and said['action'] and said['state'] is False
    assert said['patch'] is None and said['survived']
    assert said['head'] and said['phase'] and said['operation']
    assert said['source'] is False and said['image']
    said = faults.score(case, faults.Result(
        [dict(right, iter=case['step'] - 1)]))
    assert not any(said.values())
    assert not any(faults.score(case, faults.Result([])).values())


def test_a_patch_that_does_not_help_or_build_is_no_cure():
    case = case_of('scale_growth_retinanet')
    assert not faults.is_cured(case, 'optim_wrapper = dict()')
    assert not faults.is_cured(case, 'optim_wrapper = dict(nanfix=dict(x=1))')


def test_a_case_that_does_not_exist_is_misuse(capsys):
    with pytest.raises(SystemExit) as caught:
        faults.main(['no_such_case'])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count('\n') == 1
