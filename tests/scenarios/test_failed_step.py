"""A failed step, call by call: which files it enters, and who calls up."""
from __future__ import annotations

import copy
import math
import os
import sys

import pytest
from families import batch_for, build
from helpers.guards import guard_of, run
from helpers.paths import ROOT
from helpers.torch_features import needs_half
from helpers.toy import toy_batch
from helpers.training import wrap

from mmdet_nanfix.guard.standalone import NoDiagnosis

PACKAGE = os.path.join(ROOT, 'mmdet_nanfix', '')
# What is below another may not call it, but for these. (torch_support calls
# what it is handed, as Python's own map() does.)
RANKS = ['incidents', 'fp32', 'emulation', 'guard', 'diagnosis', 'hosts']
PROTOCOLS = {'MMEngineTrainer', 'ProcessGroup', 'Diagnostician'}
# With a diagnosis, which makes up to 16 replays, and without; each is one
# subject (docs/where_things_live.md).
MOST_FILES, MOST_WITHOUT = 57, 19


class Followed:
    """Region whose calls into the package are noted.

    Attributes:
        files: Those that were entered.
        upward: Caller and callee of calls from a package to one above it.
    """

    def __init__(self):
        self.files, self.upward = set(), set()

    def __enter__(self):
        sys.setprofile(self._see)
        return self

    def __exit__(self, *exc):
        sys.setprofile(None)

    def _see(self, frame, event, arg):
        path = frame.f_code.co_filename
        if event != 'call' or not path.startswith(PACKAGE):
            return
        self.files.add(path[len(PACKAGE):])
        caller = frame.f_back
        above, below = package_of(path), package_of(caller.f_code.co_filename)
        if below in RANKS and above in RANKS and RANKS.index(
                above) > max(RANKS.index(below), RANKS.index('guard') - 1):
            owner = frame.f_locals.get('self')
            name = type(owner).__name__ if owner is not None else ''
            # Modes are called by torch itself.
            if name not in PROTOCOLS and (
                    frame.f_code.co_name != '__torch_dispatch__'):
                self.upward.add((caller.f_code.co_name, below,
                                 frame.f_code.co_name, above))


def package_of(path):
    return path[len(PACKAGE):].partition(os.sep)[0] if (
        path.startswith(PACKAGE)) else ''


@needs_half
@pytest.mark.parametrize('fault', ['a high scale', 'a pixel'])
def test_a_failed_step_enters_few_files_and_calls_up_by_protocol(fault):
    model = build('faster_rcnn')
    wrapper = wrap(model, optimizer=dict(type='SGD', lr=1e-4),
                   loss_scale=dict(init_scale=64., max_scale=2.**30))
    wrapper.initialize_count_status(model, 0, 9)
    batch = batch_for(model, 96)
    model.train_step(copy.deepcopy(batch), wrapper)
    if fault == 'a high scale':
        wrapper.set_scale(2.**30)
        wrapper.scale_rules.scale = 2.**30
    else:
        batch['inputs'][0] = batch['inputs'][0].float()
        batch['inputs'][0][0, 0, 0] = math.nan
    with Followed() as seen:
        model.train_step(batch, wrapper)
    assert wrapper.stop_rule.total + wrapper.stop_rule.saved == 1
    assert seen.upward == set()
    # What computes half on a CPU is not there on a GPU.
    entered = {path for path in seen.files
               if not path.startswith('emulation')}
    assert len(entered) <= MOST_FILES, sorted(entered)


def test_a_failed_step_without_a_diagnosis_enters_very_few_files(toy):
    guard = guard_of(toy, diagnose=NoDiagnosis)
    assert run(guard, toy_batch()).incident is None
    with Followed() as seen:
        verdict = run(guard, toy_batch(box=math.nan))
    assert verdict.incident.action == 'skipped' and seen.upward == set()
    # Other runs of the process have wrapped classes that the model is of.
    entered = {path for path in seen.files if not path.startswith('fp32')}
    assert len(entered) <= MOST_WITHOUT, sorted(entered)
