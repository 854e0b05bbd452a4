"""Two gloo processes; each test has a time limit."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from helpers.paths import ROOT
from helpers.torch_features import needs_half

from mmdet_nanfix.torch_support.features import HAS_CPU_SCALER

LIMIT = 240


@pytest.fixture(scope='module')
def together(tmp_path_factory):
    """What each rank saw in a case; all cases run in one pair."""
    out = tmp_path_factory.mktemp('ranks')
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(
        [ROOT, *(os.path.join(ROOT, *parts) for parts in (
            ('bench', ), ('bench', 'lib'), ('bench', 'cost'),
            ('tests', )))]))
    processes = [subprocess.Popen(
        [sys.executable,
         os.path.join(ROOT, 'tests', 'helpers', 'ranks_worker.py'),
         str(rank), str(out / 'store'), str(out)], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)]
    try:
        told = [process.communicate(timeout=LIMIT)[0]
                for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, told):
        assert process.returncode == 0, text[-3000:]
    seen = [json.loads((out / f'seen.{rank}').read_text())
            for rank in range(2)]
    return lambda case: [of_rank[case] for of_rank in seen]


def test_a_fault_on_one_rank(together):
    """At every accumulation position, with and without unused parameters."""
    first, second = together('ddp')
    assert first == second and len(first) == 36
    for name, seen in first.items():
        counts, scale = seen['said']
        assert seen['equal'] and seen['untouched'] and seen['moved'], name
        assert seen['finite'], name
        assert counts == dict(nanfix_steps=3, nanfix_total=1,
                              nanfix_consecutive=0, nanfix_saved=0), name
        assert scale == (128 if 'gradient' in name else 256), name


def test_full_precision(together):
    first, second = together('plain')
    assert first == second
    for seen in first.values():
        assert seen['equal'] and seen['untouched'] and seen['moved']


def test_no_collective_more_in_a_healthy_step(together):
    for counts in together('collectives'):
        assert counts['AmpOptimWrapper'] == (
            counts['NanSafeAmpOptimWrapper'])
        assert counts['failed'] > 0


def test_the_rank_where_it_began_is_named(together):
    first, second = together('named')
    assert first == dict(ranks=[1], rank=0, heads=[], op=None,
                         replay='it began on another rank')
    # A loss times the NaN that the toy was given.
    assert second == dict(ranks=[1], rank=1, heads=['loss_first'], op='mul',
                          replay=None)


def test_all_ranks_retry_at_one_scale(together):
    first, second = together('retry')
    assert first == second and len(first) == 6
    for name, seen in first.items():
        assert seen['actions'] == ['retried'], name
        assert seen['equal'] and seen['moved'], name
        assert 64 < seen['scale'] < 2**30, name
        assert (seen['said']['nanfix_total'],
                seen['said']['nanfix_saved']) == (0, 1), name


def test_all_ranks_save_a_head_in_fp32(together):
    first, second = together('hot')
    for name in first:
        codes = [seen.pop('codes') for seen in (first[name], second[name])]
        seen = first[name]
        assert seen == second[name]
        assert seen['actions'] == ['rescued_fp32_head'] * 3, name
        assert seen['sticky'] == ['roi_head.bbox_head'] and seen['equal'], name
        # Who it began with knows why.
        assert 'NF103' in codes[0] + codes[1], name


def test_what_was_mended_on_the_way_is_not_stepped_on(together):
    first, second = together('tainted')
    assert first == second and len(first) == 2
    for seen in first.values():
        assert seen['actions'] == ['skipped'] and seen['kept']


def test_all_ranks_stop_together(together):
    first, second = together('stop')
    assert first == second == dict(
        stopped=2, ranks=[1], saved=['meta', 'optimizer', 'state_dict'],
        beside=['stopped_iter_2.pth'])


def test_resume_right_after_an_incident(together):
    for seen in together('resume'):
        assert seen == dict(same=True, equal=True, said=True, scale=128)


@pytest.mark.skipif(not HAS_CPU_SCALER,
                    reason='before torch 2.3 FSDP runs on a GPU only')
def test_shards(together):
    first, second = together('fsdp')
    assert first == second
    for name, (kept, (counts, scale)) in first.items():
        assert kept == [True, False], name
        assert counts['nanfix_total'] == 1 and counts['nanfix_steps'] == 2
        if 'Amp' in name:
            assert scale == (128 if 'gradient' in name else 256), name


def test_a_matcher_that_would_raise_on_one_rank(together):
    first, second = together('matching')
    assert first == second
    assert first['kept'] and first['equal']
    assert first['said'][0]['nanfix_total'] == 1


pytestmark = [needs_half, pytest.mark.timeout(LIMIT + 30),
              pytest.mark.xdist_group('ranks')]
