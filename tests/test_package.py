"""What no module owns: layers, exported names, the wheel."""
from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

PACKAGE = os.path.join(ROOT, 'mmdet_nanfix')
HOSTS = {'mmengine', 'mmcv', 'mmdet'}
# By layer: what a module may import beside the standard library, and the
# layers of this package that it may import.
LAYERS = {
    'plain': ({'rich'}, {'plain'}),
    'tensors': ({'torch', 'numpy', 'scipy'}, {'plain', 'tensors'}),
    'hosts': ({'torch', 'numpy'} | HOSTS, {'plain', 'tensors', 'hosts'}),
}
MODULES = {
    'plain': ['advice', 'causes', 'policy', 'records', 'report', 'sticky',
              'wording'],
    'tensors': ['annotations', 'arguments', 'autocast_switch', 'batches',
                'buffers', 'config_places', 'cpu_scaler', 'emulation',
                'evidence', 'experiments', 'finite', 'fp32_parts', 'half_ops',
                'half_sampling', 'head_methods', 'heads', 'history', 'host',
                'inquiry', 'locate', 'loss_formulas', 'model_kinds',
                'op_lists', 'origins', 'picture', 'precision', 'provenance',
                'raisers', 'regions', 'remedies', 'replay', 'search', 'sites',
                'step', 'torch_support', 'transaction', 'trial', 'watch',
                'widening'],
    'hosts': ['engine', 'guarded', 'hooks', 'journal', 'losses', 'mmcv_ops',
              'standin'],
}
LAYER_OF = {name: layer for layer, names in MODULES.items()
            for name in names}


STDLIB = set(getattr(sys, 'stdlib_module_names', ()))
needs_stdlib = pytest.mark.skipif(
    not STDLIB, reason='Python names its own modules from 3.10 on')


def imports(source):
    """Top-level names of other packages, and modules of this one."""
    others, ours = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            others |= {alias.name.partition('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                ours |= {node.module} if node.module else {
                    alias.name for alias in node.names}
            else:
                others.add(node.module.partition('.')[0])
    return others - STDLIB, ours


def breaches(layer, source):
    may_others, may_layers = LAYERS[layer]
    others, ours = imports(source)
    return sorted(others - may_others) + sorted(
        name for name in ours if LAYER_OF[name] not in may_layers)


def source_of(name):
    with open(os.path.join(PACKAGE, f'{name}.py')) as file:
        return file.read()


def test_every_module_has_a_layer_a_test_and_a_line_in_the_map():
    names = {name[:-3] for name in os.listdir(PACKAGE)
             if name.endswith('.py') and name != '__init__.py'}
    assert names == set(LAYER_OF)
    tests = os.listdir(os.path.join(ROOT, 'tests'))
    assert {f'test_{name}.py' for name in names} <= set(tests)
    import mmdet_nanfix
    assert all(f'``{name}``' in mmdet_nanfix.__doc__ for name in names)


@needs_stdlib
@pytest.mark.parametrize('name', sorted(LAYER_OF))
def test_imports_go_down_only(name):
    assert breaches(LAYER_OF[name], source_of(name)) == []


def test_no_import_cycles():
    graph = {name: imports(source_of(name))[1] for name in LAYER_OF}
    while graph:
        leaves = [name for name, needed in graph.items()
                  if not needed & set(graph)]
        assert leaves, f'cycle among {sorted(graph)}'
        for name in leaves:
            del graph[name]


@needs_stdlib
@pytest.mark.parametrize('layer, source, found', [
    ('plain', 'import torch', ['torch']),
    ('plain', 'def f():\n    from . import step', ['step']),
    ('tensors', 'from mmdet.models import x', ['mmdet']),
    ('tensors', 'from .engine import x', ['engine']),
    ('hosts', 'import scipy', ['scipy']),
    ('plain', 'import os, json\nfrom .records import x', []),
])
def test_the_import_rule_can_fail(layer, source, found):
    assert breaches(layer, source) == found


@pytest.mark.parametrize('name', ['', *sorted(LAYER_OF)])
def test_exported_names(name):
    module = importlib.import_module(
        f'mmdet_nanfix.{name}' if name else 'mmdet_nanfix')
    assert module.__all__ == sorted(
        module.__all__, key=lambda text: (text.startswith('_'), text)), name
    for public in module.__all__:
        assert getattr(module, public).__doc__ or public == '__version__' or (
            public.isupper())


def sources():
    for folder in ('mmdet_nanfix', 'tools', 'bench', 'configs', 'tests'):
        for place, _, names in os.walk(os.path.join(ROOT, folder)):
            yield from (os.path.join(place, name) for name in names
                        if name.endswith('.py'))


def test_the_syntax_is_that_of_python_3_8():
    seen = 0
    for path in sources():
        with open(path) as file:
            ast.parse(file.read(), path, feature_version=(3, 8))
        seen += 1
    assert seen > 150
    with pytest.raises(SyntaxError):
        ast.parse('match x:\n    case 1: pass', feature_version=(3, 8))


def test_a_python_3_8_compiles_all_sources(tmp_path):
    sys.path.insert(0, os.path.join(ROOT, 'tools'))
    from setup_env import STACKS, find_python
    oldest = STACKS['oldest']._replace(pythons=((3, 8), ))
    try:
        python = find_python(oldest)
    except SystemExit:
        pytest.skip('there is no Python 3.8 here')
    code = ('import sys\n'
            'for path in sys.stdin.read().split("\\n"):\n'
            '    compile(open(path, encoding="utf-8").read(), path, "exec")\n'
            'print(sys.version_info[:2])\n')
    done = subprocess.run([python, '-c', code], input='\n'.join(sources()),
                          text=True, capture_output=True, timeout=60)
    assert done.stdout.strip() == '(3, 8)', done.stderr


def test_no_assert_in_the_package():
    for name in LAYER_OF:
        assert not any(isinstance(node, ast.Assert)
                       for node in ast.walk(ast.parse(source_of(name))))


def test_the_wheel_works_outside_the_checkout(tmp_path):
    done = subprocess.run(
        [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps',
         '--no-build-isolation', '-w', str(tmp_path), ROOT],
        text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel, ) = tmp_path.glob('mmdet_nanfix-*.whl')
    place = tmp_path / 'site'
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(place)
    modules = {name.partition('/')[2] for name in names
               if name.startswith('mmdet_nanfix/')}
    assert {f'{name}.py' for name in LAYER_OF} | {
        '__init__.py', 'py.typed'} == modules
    code = ('import mmdet_nanfix, mmdet.registry as r; print('
            'mmdet_nanfix.__file__, '
            'r.OPTIM_WRAPPERS.get("AmpOptimWrapper").__name__)')
    env = dict(os.environ, PYTHONPATH=str(place))
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path,
                          env=env, text=True, capture_output=True,
                          timeout=240)
    path, name = done.stdout.split()[-2:]
    assert path.startswith(str(place))
    assert name == 'NanSafeAmpOptimWrapper'


def test_an_import_without_hosts(tmp_path):
    """A machine that only reads logs needs neither torch nor MMEngine."""
    code = ('import sys\n'
            'class Hide:\n'
            '    def find_spec(self, name, *rest):\n'
            '        if name.partition(".")[0] in '
            '("torch", "mmengine", "mmcv", "mmdet"):\n'
            '            raise ModuleNotFoundError(name)\n'
            'sys.meta_path.insert(0, Hide())\n'
            'import importlib.util as u\n'
            'find = u.find_spec\n'
            'u.find_spec = lambda n, *a: None if n in '
            '("mmengine", "mmcv", "mmdet") else find(n, *a)\n'
            'import mmdet_nanfix.report as report\n'
            'raise SystemExit(report.main([sys.argv[1]]))\n')
    done = subprocess.run([sys.executable, '-c', code, str(tmp_path)],
                          text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
