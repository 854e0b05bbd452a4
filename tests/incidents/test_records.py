from __future__ import annotations

import json
import math

import pytest
from helpers.incidents import fail, incident

from mmdet_nanfix.incidents import Cause, short_source

KEYS = {'schema', 'time', 'rank', 'epoch', 'iter', 'where', 'heads', 'images',
        'loss_scale', 'cause', 'action', 'counts', 'error', 'ranks', 'origin',
        'replay', 'remedy'}


def test_every_key_is_there_and_unknown_ones_are_null():
    record = json.loads(incident().to_json())
    assert set(record) == KEYS
    assert set(record['where']) == {'phase', 'head', 'module', 'level', 'op',
                                    'source', 'kind'}
    assert record['where']['module'] is None and record['images'] is None
    assert record['cause'] is None
    assert set(record['heads']['rpn_head']) == {'losses', 'bad_losses',
                                                'bad_grads', 'n_params'}


@pytest.mark.parametrize('value, spelt', [
    (math.nan, 'nan'), (math.inf, 'inf'), (-math.inf, '-inf'), (.5, .5)])
def test_json_is_strict(value, spelt):
    text = incident(value=value).to_json()
    record = json.loads(text, parse_constant=fail)
    assert record['heads']['roi_head.bbox_head']['losses']['loss_cls'] == (
        spelt)


@pytest.mark.parametrize('source, short', [
    ('/a/site-packages/mmdet/x.py:3', 'mmdet/x.py:3'),
    ('/usr/lib/python3/dist-packages/mmdet/x.py:3', 'mmdet/x.py:3'),
    ('/nowhere/else/x.py:3', '/nowhere/else/x.py:3'), ('x.py:3', 'x.py:3')])
def test_sources_are_short(source, short):
    assert short_source(source) == short


def test_a_cause_has_the_title_of_its_code():
    assert Cause('NF105', [], '').title == 'bad pixels or input values'
    with pytest.raises(KeyError):
        Cause('NF100', [], '')
