from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.incidents import fail, incident
from helpers.paths import ROOT

from mmdet_nanfix.incidents import IncidentLog
from mmdet_nanfix.incidents.log import log_name
from mmdet_nanfix.report import main
from mmdet_nanfix.report.table import find_logs


def write(work_dir, run, rank, *incidents):
    log = IncidentLog(str(work_dir / run / 'nanfix'), rank, fail)
    for one in incidents:
        log.write(one)


def test_all_resumes_and_ranks(tmp_path, capsys):
    write(tmp_path, '20240102_000000', 0, incident(5))
    write(tmp_path, '20240102_000000', 1, incident(5))
    write(tmp_path, '20240101_000000', 0, incident(1), incident(2))
    (tmp_path / 'vis_data').mkdir()
    (tmp_path / 'vis_data' / 'incidents.jsonl').write_text('not ours')
    assert [path[len(str(tmp_path)) + 1:] for path in find_logs(tmp_path)] \
        == ['20240101_000000/nanfix/incidents.jsonl',
            '20240102_000000/nanfix/incidents.jsonl',
            '20240102_000000/nanfix/incidents_rank1.jsonl']
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert '4 incident(s) in 3 log(s)' in out
    assert main([str(tmp_path), '--json']) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)['iter'] for line in lines] == [1, 2, 5, 5]


def test_exit_zero_without_incidents(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert 'No incident log' in capsys.readouterr().out
    write(tmp_path, 'run', 0)
    assert main([str(tmp_path)]) == 0
    assert 'No incident in 1 log' in capsys.readouterr().out


@pytest.mark.parametrize('arguments, named', [
    (['/nonexistent/place'], '/nonexistent/place'),
    ([], 'work_dir'),
    (['.', '--nonsense'], '--nonsense'),
])
def test_misuse_is_one_line_and_exit_two(arguments, named, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert named in error and error.count('\n') == 1


@pytest.mark.parametrize('typed', ['run/nanfix', 'run/nanfix/', 'run', '.'])
def test_any_folder_on_the_way_is_accepted(tmp_path, capsys, typed,
                                           monkeypatch):
    write(tmp_path, 'run', 0, incident())
    monkeypatch.chdir(tmp_path)
    assert main([typed]) == 1
    monkeypatch.chdir(tmp_path / 'run' / 'nanfix')
    assert main(['.']) == 1


def test_a_linked_run_is_read_once(tmp_path):
    write(tmp_path, 'run', 0, incident())
    (tmp_path / 'link').symlink_to(tmp_path / 'run')
    (tmp_path / 'run' / 'loop').symlink_to(tmp_path)
    assert len(find_logs(tmp_path)) == 1
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'link').symlink_to(tmp_path / 'run')
    assert len(find_logs(tmp_path / 'other')) == 1


@pytest.mark.parametrize('change, status', [
    (dict(where=None), 1),
    (dict(loss_scale=dict(before=None, after='nan')), 1),
    (dict(heads=dict(x_head=dict(losses={}, bad_losses=['zz']))), 1),
    (dict(counts='many'), 0),
    (dict(heads=dict(x_head=3)), 2),
])
def test_strange_incidents_end_in_no_traceback(tmp_path, capsys, change,
                                               status):
    record = {**json.loads(incident().to_json()), **change}
    path = tmp_path / 'run' / 'nanfix' / log_name(0)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record) + '\n' + '[' * 100000 + '\n'
                    + '{"schema": NaN}\n')
    if status == 2:
        with pytest.raises(SystemExit) as caught:
            main([str(tmp_path)])
        assert caught.value.code == 2
        assert capsys.readouterr().err.count('\n') == 1
    else:
        assert main([str(tmp_path)]) == status


def test_names_are_printed_as_they_are(tmp_path, capsys):
    # rich would read markup in them.
    strange = incident()
    strange.heads['[red]x_head[/]'] = strange.heads.pop('rpn_head')
    strange.where.head = '[red]x_head[/]'
    write(tmp_path, '[bold]run', 0, strange)
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert '[bold]run' in out


def test_both_forms_are_one_tool_and_load_no_host(tmp_path):
    write(tmp_path, 'run', 0, incident())
    forms = ([sys.executable, '-X', 'importtime', '-m',
              'mmdet_nanfix.report'], [sys.executable, 'tools/nan_report.py'])
    outs = []
    for form in forms:
        done = subprocess.run([*form, str(tmp_path)], cwd=ROOT, text=True,
                              capture_output=True, timeout=60)
        assert done.returncode == 1
        assert ' torch\n' not in done.stderr
        outs.append(done.stdout)
    assert outs[0] == outs[1] and 'roi_head' in outs[0]
