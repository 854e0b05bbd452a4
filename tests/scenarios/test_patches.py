"""What is replaced in torch and in the hosts, and that it is put back."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from helpers.paths import ROOT
from helpers.torch_features import needs_half

# All functions of all modules and classes of torch's, mmcv's and mmdet's,
# but for what torch fills in lazily.
CODE = """
import gc, json, sys
import mmcv.ops, mmdet.apis, mmdet.models, mmengine.runner
import torch

def functions():
    found = {}
    for module in list(sys.modules.values()):
        name = getattr(module, '__name__', '')
        if name.partition('.')[0] not in ('torch', 'mmcv', 'mmdet'):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({(name, key, own): function for own, function
                              in list(vars(value).items())
                              if callable(function)})
    return found

# Torch replaces some of its own, with the first optimizer.
import torch._dynamo
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], .1)
before = functions()
import mmdet_nanfix
from families import batch_for, build
from mmdet.registry import OPTIM_WRAPPERS
from mmengine.optim import build_optim_wrapper
from mmdet_nanfix.torch_support.patching import replaced

kind = OPTIM_WRAPPERS.get('AmpOptimWrapper').__name__
guarded = not len(sys.argv) > 1
model = build('faster_rcnn')
wrapper = build_optim_wrapper(model, dict(
    type='NanSafeAmpOptimWrapper' if guarded else 'OptimWrapper',
    optimizer=dict(type='SGD', lr=1e-4)))
wrapper.initialize_count_status(model, 0, 2)
batch = batch_for(model, 96)
model.train_step(batch, wrapper)
if guarded:
    wrapper.scale_rules.scale = 2.**30
    wrapper.set_scale(2.**30)
    model.train_step(batch, wrapper)
    assert wrapper.stop_rule.total + wrapper.stop_rule.saved == 1
during = sorted({item.owner for item in replaced()})
del wrapper
gc.collect()
now = functions()
print(json.dumps(dict(
    kind=kind, during=during,
    after=sorted({item.owner for item in replaced()}),
    changed=sorted(str(key) for key in before
                   if before[key] is not now.get(key)))))
"""


def run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', CODE, *arguments], cwd=ROOT,
        env={**os.environ, **environment, 'PYTHONPATH': os.pathsep.join([
            ROOT, *(os.path.join(ROOT, 'bench', name)
                    for name in ('', 'lib'))])},
        capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_half
def test_after_the_last_guarded_run_all_is_as_before():
    found = run()
    assert 'fp32 regions' in found['during']
    assert found['after'] == [] and found['changed'] == []


def test_off_leaves_no_patch():
    found = run('off', MMDET_NANFIX='off')
    assert found['kind'] == 'StockAmpOptimWrapper'
    assert found['during'] == found['after'] == found['changed'] == []


def test_every_owner_of_patches_is_listed():
    with open(os.path.join(ROOT, 'docs', 'patches.md')) as file:
        listed = set(re.findall(r'^\| `([a-z0-9 ]+)` \|', file.read(),
                                re.MULTILINE))
    found = set()
    for place, _, names in os.walk(os.path.join(ROOT, 'mmdet_nanfix')):
        for name in names:
            if name.endswith('.py') and name != 'patching.py':
                with open(os.path.join(place, name)) as file:
                    found |= set(re.findall(r"\bPatches\('([^']+)'",
                                            file.read()))
    assert found == listed and len(listed) > 4


def test_nothing_else_replaces_anything():
    """By hand it would be in no list, and not be put back in order."""
    # Marks of functions of our own, and values of plain objects.
    way = r'\bsetattr\((?!self\b|function\b|forward\b|bits\b)'
    for place, _, names in os.walk(os.path.join(ROOT, 'mmdet_nanfix')):
        for name in names:
            if name.endswith('.py') and name != 'patching.py':
                with open(os.path.join(place, name)) as file:
                    assert not re.search(way, file.read()), name
