from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdet_nanfix.records import (
    Counts,
    HeadState,
    Incident,
    IncidentLog,
    LossScaleChange,
    Where,
    log_name,
    read_log,
)

KEYS = {'schema', 'time', 'rank', 'epoch', 'iter', 'where', 'heads', 'images',
        'loss_scale', 'cause', 'action', 'counts', 'error', 'ranks', 'origin',
        'replay', 'remedy'}


def incident(iteration=7, value=math.nan):
    return Incident(
        rank=0, epoch=2, iter=iteration,
        where=Where(phase='loss', head='roi_head.bbox_head', kind='nan'),
        heads={
            'backbone': HeadState(n_params=3),
            'rpn_head': HeadState(losses={'loss_rpn_cls': .5}, n_params=6),
            'roi_head.bbox_head': HeadState(
                losses={'loss_cls': value, 'loss_bbox': 1.},
                bad_losses=['loss_cls'],
                bad_grads=['roi_head.bbox_head.fc_cls.weight'], n_params=8),
        },
        loss_scale=LossScaleChange(512., 256.), action='skipped',
        counts=Counts(1, 3, 100))


def fail(message):
    raise AssertionError(message)


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


def test_log_round_trip_and_rank_names(tmp_path):
    path = tmp_path / 'deep' / 'nanfix' / log_name(0)
    log = IncidentLog(str(path), fail)
    assert list(read_log(path)) == []
    log.write(incident(1))
    log.write(incident(2))
    assert [record['iter'] for record in read_log(path)] == [1, 2]
    assert log_name(3) == 'incidents_rank3.jsonl'


@given(st.integers(0, 400))
def test_a_torn_line_is_passed_over_and_not_continued(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp('torn') / 'incidents.jsonl'
    whole = incident(1).to_json().encode() + b'\n'
    torn = incident(2).to_json().encode()[:cut]
    path.write_bytes(whole + torn)
    assert [record['iter'] for record in read_log(path)] == [1]
    IncidentLog(str(path), fail).write(incident(3))
    assert [record['iter'] for record in read_log(path)] == [1, 3]


def test_no_log_is_kept_without_a_path():
    IncidentLog(None, fail).write(incident())


def test_unwritable_folder_warns_once(tmp_path):
    (tmp_path / 'file').write_text('')
    warnings = []
    log = IncidentLog(str(tmp_path / 'file' / 'incidents.jsonl'),
                      warnings.append)
    log.write(incident())
    log.write(incident())
    assert len(warnings) == 1
    assert 'training goes on' in warnings[0] and '\n' not in warnings[0]


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full')
def test_full_disk_warns_once(tmp_path):
    # A device without space: opening works, writing does not.
    path = tmp_path / 'incidents.jsonl'
    path.symlink_to('/dev/full')
    warnings = []
    log = IncidentLog(str(path), warnings.append)
    log.write(incident())
    log.write(incident())
    assert len(warnings) == 1 and 'No space left' in warnings[0]


def test_a_killed_writer_leaves_a_readable_log(tmp_path):
    path = tmp_path / 'incidents.jsonl'
    code = ('import sys; sys.path[:0] = sys.argv[2:]\n'
            'from test_records import incident, IncidentLog\n'
            'log = IncidentLog(sys.argv[1], print)\n'
            'n = 0\n'
            'while True:\n'
            '    n += 1; log.write(incident(n)); print(n, flush=True)\n')
    here = os.path.dirname(__file__)
    process = subprocess.Popen([sys.executable, '-c', code, str(path), here],
                               stdout=subprocess.PIPE, text=True)
    for _ in range(50):
        seen = int(process.stdout.readline())
    process.kill()
    process.stdout.close()
    process.wait(timeout=30)
    read = [record['iter'] for record in read_log(path)]
    assert read == list(range(1, len(read) + 1)) and len(read) >= seen
