"""The set-up script, as far as it goes without a network."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.paths import ROOT

SCRIPT = os.path.join(ROOT, 'tools', 'setup_env.py')
sys.path.insert(0, os.path.dirname(SCRIPT))
import setup_env  # noqa: E402


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


def test_a_stack_that_does_not_exist():
    done = run('--stack', 'newest')
    assert done.returncode == 2 and 'Traceback' not in done.stderr
    assert all(name in done.stderr for name in setup_env.STACKS)


def test_stacks_have_folders_and_requirements_of_their_own():
    stacks = [setup_env.Environment(name) for name in setup_env.STACKS]
    assert len({stack.folder for stack in stacks}) == len(stacks) == 3
    assert len({stack.fingerprint() for stack in stacks}) == 3
    for stack in stacks:
        with open(stack.requirements) as file:
            names = {line.partition('==')[0] for line in file}
        assert {'pytest', 'hypothesis', 'expecttest', 'rich'} <= names
        # It is asked for beside them, so that none brings another.
        assert 'numpy' not in names


def test_no_python_of_the_wanted_version(capsys):
    stack = setup_env.STACKS['common']._replace(pythons=((3, 99), (2, 0)))
    with pytest.raises(SystemExit) as caught:
        setup_env.find_python(stack)
    line = capsys.readouterr().err
    assert caught.value.code == 2 and line.count('\n') == 1
    assert 'no Python 3.99 or 2.0' in line and 'python3.99-venv' in line


@pytest.mark.parametrize('stack, python', [
    ('main', ' .venv/bin/python'), ('common', '.venv-common/bin/python')])
def test_make_runs_a_stack_in_its_environment(stack, python):
    done = subprocess.run(
        ['make', '-n', 'test', f'STACK={stack}', 'PYTHON='], cwd=ROOT,
        text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f'tools/setup_env.py --stack "{stack}"' in done.stdout
    assert f'{python.strip()} -m pytest' in done.stdout
    assert ('ruff' in done.stdout) == (stack == 'main')
