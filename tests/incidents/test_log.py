from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.incidents import fail, incident
from hypothesis import given
from hypothesis import strategies as st

from mmdet_nanfix.incidents import IncidentLog, read_log
from mmdet_nanfix.incidents.log import log_name


def test_log_round_trip_and_rank_names(tmp_path):
    path = tmp_path / 'deep' / 'nanfix' / log_name(0)
    log = IncidentLog(str(path.parent), 0, fail)
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
    IncidentLog(str(path.parent), 0, fail).write(incident(3))
    assert [record['iter'] for record in read_log(path)] == [1, 3]


def test_no_log_is_kept_without_a_path():
    IncidentLog(None, 0, fail).write(incident())


def test_unwritable_folder_warns_once(tmp_path):
    (tmp_path / 'file').write_text('')
    warnings = []
    log = IncidentLog(str(tmp_path / 'file'), 0, warnings.append)
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
    log = IncidentLog(str(tmp_path), 0, warnings.append)
    log.write(incident())
    log.write(incident())
    assert len(warnings) == 1 and 'No space left' in warnings[0]


def test_a_killed_writer_leaves_a_readable_log(tmp_path):
    path = tmp_path / 'incidents.jsonl'
    code = ('import sys; sys.path[:0] = sys.argv[2:]\n'
            'from helpers.incidents import incident\n'
            'from mmdet_nanfix.incidents import IncidentLog\n'
            'log = IncidentLog(sys.argv[1], 0, print)\n'
            'n = 0\n'
            'while True:\n'
            '    n += 1; log.write(incident(n)); print(n, flush=True)\n')
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(
        [sys.executable, '-c', code, str(tmp_path), tests],
        stdout=subprocess.PIPE, text=True)
    for _ in range(50):
        seen = int(process.stdout.readline())
    process.kill()
    process.stdout.close()
    process.wait(timeout=30)
    read = [record['iter'] for record in read_log(path)]
    assert read == list(range(1, len(read) + 1)) and len(read) >= seen
