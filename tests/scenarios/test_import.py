"""What the one import costs, before anything is trained."""
from __future__ import annotations

import json
import os
import subprocess
import sys

from helpers.paths import ROOT

from mmdet_nanfix.torch_support.features import HAS_EAGER_STANCE

CODE = """
import json, sys, time
import mmdet.apis, mmdet.models, mmengine.runner
before, begin = set(sys.modules), time.perf_counter()
import mmdet_nanfix
print(json.dumps([time.perf_counter() - begin,
                  sorted(set(sys.modules) - before)]))
"""
# Loaded when the guard is armed, or a failed step is told of.
LATER = ('torch._dynamo', 'mmdet_nanfix.diagnosis', 'mmdet_nanfix.emulation',
         'mmdet_nanfix.report', 'rich.table', 'scipy.optimize')


def test_the_import_is_quick_and_loads_what_is_needed_alone():
    """0.05 s where MMDetection is loaded, seen on an idle machine."""
    out = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', CODE], cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': ROOT}, check=True,
        capture_output=True, text=True, timeout=120).stdout
    seconds, loaded = json.loads(out.splitlines()[-1])
    later = set(LATER)
    if not HAS_EAGER_STANCE:
        # Older torch has to be asked at once to keep its compiler out.
        later.remove('torch._dynamo')
    assert not later & set(loaded)
    # 0.3 s are promised from torch 2.6 on; the machine may be busy.
    assert seconds < (0.6 if HAS_EAGER_STANCE else 5.)
