"""What no module owns: layers, exported names, the wheel."""
from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import typing
import zipfile

import pytest
from helpers.paths import ROOT

PACKAGE = os.path.join(ROOT, 'mmdet_nanfix')
TORCH, HOSTS = {'torch', 'numpy'}, {'mmengine', 'mmcv', 'mmdet'}
# By package: those of ours that it may import, through their `__init__`
# alone, and what it may import beside the standard library.
MAY_IMPORT = {
    'incidents': (set(), {'rich'}),
    'torch_support': (set(), TORCH),
    'fp32': ({'torch_support'}, TORCH),
    # Kernels of mmcv's compiled operations; nothing is imported where a GPU
    # trains.
    'emulation': ({'torch_support'}, TORCH | HOSTS),
    'guard': ({'incidents', 'torch_support'}, TORCH | {'scipy'}),
    'diagnosis': ({'guard', 'incidents', 'torch_support', 'fp32'}, TORCH),
    'report': ({'incidents'}, {'rich'}),
    'check': ({'incidents', 'report', 'hosts'}, {'rich'}),
    'hosts': ({'incidents', 'torch_support', 'fp32', 'emulation', 'guard',
               'diagnosis', 'report'}, TORCH | HOSTS),
}
MOST_LINES, MOST_ENTRIES, MOST_DEEP = 330, 11, 4
MOST_NAMES, MOST_TOP_NAMES = 12, 10
# Names that users and other programs rely on (README, Python).
FOR_USERS = {'emulation': {'cuda_autocast'}, 'report': {'main'}}
# They load what is not always there.
MAY_USE_IMPORTLIB = {'mmdet_nanfix', 'mmdet_nanfix.hosts'}

STDLIB = set(getattr(sys, 'stdlib_module_names', ()))
needs_stdlib = pytest.mark.skipif(
    not STDLIB, reason='Python names its own modules from 3.10 on')


def modules():
    """Paths of the package's modules by dotted name."""
    found = {}
    for folder, _, names in os.walk(PACKAGE):
        for name in names:
            if name.endswith('.py'):
                path = os.path.join(folder, name)
                dotted = os.path.relpath(path, ROOT)[:-3].replace(os.sep, '.')
                found[dotted[:-9] if dotted.endswith('.__init__')
                      else dotted] = path
    return found


MODULES = modules()
PACKAGES = sorted(name for name, path in MODULES.items()
                  if path.endswith('__init__.py'))


def source_of(name):
    with open(MODULES[name]) as file:
        return file.read()


def package_of(name):
    """First folder below the package, or ''."""
    parts = name.split('.')
    return parts[1] if len(parts) > 2 or name in PACKAGES[1:] else ''


def imports(name, source):
    """Top-level names of other packages, and modules of this one."""
    others, ours = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            others |= {alias.name.partition('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                ours |= imports_of(name, node)
            else:
                others.add(node.module.partition('.')[0])
    return others - STDLIB, ours - {name}


def imports_of(name, node):
    """Modules of ours that a statement of a module imports from."""
    if not node.level:
        return set()
    parts = (name if name in PACKAGES else name.rpartition('.')[0]).split('.')
    base = '.'.join([*parts[:len(parts) - node.level + 1],
                     *[node.module] * bool(node.module)])
    return {f'{base}.{alias.name}' if f'{base}.{alias.name}' in MODULES
            else base for alias in node.names}


def breaches(name, source):
    """What a module imports and may not."""
    package = package_of(name)
    may_ours, may_others = MAY_IMPORT[package]
    others, ours = imports(name, source)
    for other in sorted(others - may_others):
        if other != 'importlib':
            yield other
    for target in sorted(ours):
        other = package_of(target)
        if other != package and (
                other not in may_ours or target not in PACKAGES):
            yield target


@needs_stdlib
@pytest.mark.parametrize('name', sorted(
    name for name in MODULES if package_of(name)))
def test_imports_go_down_only_and_through_interfaces(name):
    assert list(breaches(name, source_of(name))) == []


@needs_stdlib
@pytest.mark.parametrize('name, source, found', [
    ('incidents.x', 'import torch', ['torch']),
    ('guard.x', 'def f():\n    from ..fp32 import y', ['mmdet_nanfix.fp32']),
    ('fp32.x', 'from mmdet.models import x', ['mmdet']),
    ('emulation.x', 'from ..torch_support.features import HALVES',
     ['mmdet_nanfix.torch_support.features']),
    ('emulation.x', 'import os, json\nfrom ..torch_support import x', []),
])
def test_the_import_rule_can_fail(name, source, found):
    assert list(breaches(f'mmdet_nanfix.{name}', source)) == found


def test_importlib_is_for_what_is_not_always_there():
    users = {name for name in MODULES if re.search(
        r'^\s*(import|from) importlib', source_of(name), re.MULTILINE)}
    assert {name for name in users if not any(
        name == place or place.count('.') and name.startswith(f'{place}.')
        for place in MAY_USE_IMPORTLIB)} == set()


def graph():
    """Modules of the same package that each module imports."""
    return {name: {target for target in imports(name, source_of(name))[1]
                   if package_of(target) == package_of(name)}
            for name in MODULES if package_of(name)}


def test_no_import_cycles():
    left = {name: imports(name, source_of(name))[1] for name in MODULES}
    while left:
        leaves = [name for name, needed in left.items()
                  if not needed & set(left)]
        assert leaves, f'cycle among {sorted(left)}'
        for name in leaves:
            del left[name]


def test_no_package_is_deep_or_large():
    inside = graph()

    def depth(name):
        return 1 + max(map(depth, inside[name]), default=0)

    deep = {name: depth(name) for name in inside if name not in PACKAGES}
    assert {name: count for name, count in deep.items()
            if count > MOST_DEEP} == {}
    assert {name: count for name in inside
            if (count := source_of(name).count('\n')) > MOST_LINES} == {}
    for name in PACKAGES[1:]:
        entries = set(os.listdir(os.path.dirname(MODULES[name]))) - {
            '__init__.py', '__pycache__'}
        assert len(entries) <= MOST_ENTRIES, name


@pytest.mark.parametrize('name', PACKAGES)
def test_a_package_names_what_is_inside(name):
    module = importlib.import_module(name)
    for inner in MODULES:
        if inner.startswith(f'{name}.') and inner.count('.') == (
                name.count('.') + 1) and not inner.endswith('__main__'):
            assert f'``{inner.rpartition(".")[2]}``' in module.__doc__, inner


@pytest.mark.parametrize('name', sorted(MODULES))
def test_exported_names(name):
    if name.endswith('__main__'):
        pytest.skip('a command exports nothing')
    module = importlib.import_module(name)
    names = getattr(module, '__all__', [])
    assert name in PACKAGES or names, name
    assert list(names) == sorted(
        names, key=lambda text: (text.startswith('_'), text)), name
    for public in names:
        value = getattr(module, public)
        # Of what is no class and no function a comment speaks.
        assert value.__doc__ or public == '__version__' or (
            public.isupper()) or typing.get_origin(value), public


@pytest.mark.parametrize('name', PACKAGES)
def test_an_interface_offers_what_is_used(name):
    names = set(getattr(importlib.import_module(name), '__all__', ()))
    assert len(names) <= (MOST_NAMES if '.' in name else MOST_TOP_NAMES)
    if '.' not in name:
        return
    used = set(FOR_USERS.get(name.partition('.')[2], ()))
    for other in MODULES:
        if package_of(other) == package_of(name) and (
                not other.startswith(f'{name}.') and name.count('.') < 2):
            continue
        for node in ast.walk(ast.parse(source_of(other))):
            if isinstance(node, ast.ImportFrom):
                if other != name and name in {
                        target for target in imports_of(other, node)}:
                    used |= {alias.name for alias in node.names}
            elif other.count('.') < 2 and package_of(other) in ('', 'hosts'):
                # The top `__init__` asks the hosts for classes by name.
                used |= {getattr(node, 'attr', None),
                         getattr(node, 'value', None)
                         if isinstance(node, ast.Constant) else None}
    assert names - used == set()


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
    for name in MODULES:
        assert not any(isinstance(node, ast.Assert)
                       for node in ast.walk(ast.parse(source_of(name))))


def test_the_wheel_works_outside_the_checkout(tmp_path):
    # A copy: a build leaves files that a later one would pack again.
    checkout = tmp_path / 'checkout'
    shutil.copytree(PACKAGE, checkout / 'mmdet_nanfix')
    for name in ('setup.cfg', 'pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(os.path.join(ROOT, name), checkout)
    done = subprocess.run(
        [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps',
         '--no-build-isolation', '-w', str(tmp_path), str(checkout)],
        text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel, ) = tmp_path.glob('mmdet_nanfix-*.whl')
    place = tmp_path / 'site'
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(place)
    packed = {name for name in names if name.startswith('mmdet_nanfix/')}
    assert packed == {os.path.relpath(path, ROOT).replace(os.sep, '/')
                      for path in MODULES.values()} | {
                          'mmdet_nanfix/py.typed'}
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


def test_slow_tests_are_tests_and_no_file_is_slow_as_a_whole(request):
    """The quick suite keeps something of every file."""
    quick, beginnings = set(), set()
    with open(os.path.join(ROOT, 'tests', 'slow.txt')) as file:
        listed = [line.strip() for line in file if line.startswith('tests/')]
    for item in request.session.items:
        found = [text for text in listed if item.nodeid.startswith(text)]
        beginnings |= set(found)
        assert bool(found) == bool(item.get_closest_marker('slow'))
        if not found:
            quick.add(item.nodeid.partition('::')[0])
    files = {item.nodeid.partition('::')[0] for item in request.session.items}
    assert files == quick
    if request.config.option.markexpr == '' and len(files) > 60:
        assert set(listed) == beginnings
