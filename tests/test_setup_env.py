"""The set-up script, as far as it goes without a network."""
import os
import subprocess
import sys

from conftest import ROOT

SCRIPT = os.path.join(ROOT, 'tools', 'setup_env.py')


def run(*arguments, cwd=ROOT, **env):
    return subprocess.run([sys.executable, SCRIPT, *arguments], cwd=cwd,
                          env=dict(os.environ, **env), text=True,
                          capture_output=True, timeout=120)


def one_line(done):
    assert done.returncode == 2
    assert done.stderr.count('\n') == 1 and 'Traceback' not in done.stderr
    return done.stderr


def test_an_environment_with_mmdet_is_accepted():
    assert run('--check', sys.executable).returncode == 0


def test_an_interpreter_that_is_none():
    line = one_line(run('--check', '/nonexistent/python'))
    assert '/nonexistent/python is not an executable' in line


def test_an_environment_without_mmdet(tmp_path):
    bare = tmp_path / 'python'
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    line = one_line(run('--check', str(bare), PYTHONPATH=''))
    assert 'cannot run mmdet' in line and 'leave PYTHON out' in line


def failing_pip(tmp_path, output):
    """A checkout whose environment has a pip that fails."""
    root = tmp_path / 'checkout'
    for folder in ('tools', '.ci', '.venv/bin'):
        (root / folder).mkdir(parents=True)
    for name in ('tools/setup_env.py', '.ci/requirements-main.txt',
                 'setup.cfg', 'pyproject.toml'):
        with open(os.path.join(ROOT, name)) as file:
            (root / name).write_text(file.read())
    (root / '.venv/bin/pip').write_text('')
    python = root / '.venv/bin/python'
    python.write_text(f'#!/bin/sh\necho "{output}"\nexit 1\n')
    python.chmod(0o755)
    return subprocess.run([sys.executable, str(root / 'tools/setup_env.py')],
                          text=True, capture_output=True, timeout=120)


def test_no_network(tmp_path):
    line = one_line(failing_pip(
        tmp_path, 'NewConnectionError: Temporary failure in name resolution'))
    assert 'package index was not reached' in line
    assert 'goes on from here' in line


def test_no_disk(tmp_path):
    line = one_line(failing_pip(
        tmp_path, 'ERROR: [Errno 28] No space left on device'))
    assert 'the disk is full' in line and 'free some space' in line


def test_another_failure_names_the_log(tmp_path):
    line = one_line(failing_pip(tmp_path, 'something else'))
    assert '.setup/setup.log' in line
