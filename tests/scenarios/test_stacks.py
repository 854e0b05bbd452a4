"""The same record of a fault on every stack of versions.

``python tests/scenarios/test_stacks.py`` writes the files in ``records/``.
"""
from __future__ import annotations

import json
import os
import re
import sys

import pytest
from helpers.paths import ROOT

FAULTS = os.path.join(ROOT, 'bench', 'faults')
sys.path.insert(0, FAULTS)
import run as faults  # noqa: E402

RECORDS = os.path.join(ROOT, 'tests', 'scenarios', 'records')
CASES = ['nan_pixel_faster_rcnn', 'zero_width_box_retinanet',
         'large_label_faster_rcnn', 'half_linear_bbox_head_faster_rcnn',
         'high_scale_faster_rcnn']
# Sums of half numbers depend on their order in the last places, and with them
# what is measured of a tensor.
MEASURED = {'amax', 'nan', 'inf', '-inf'}


def without_places(value):
    """A record without its time, folders, and lines of torch.

    The hosts' versions are the same on all stacks, so their lines are too.
    """
    if isinstance(value, dict):
        return {key: without_places(item) for key, item in value.items()
                if key != 'time'}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    if isinstance(value, str):
        value = re.sub(r'\S*/(?:site|dist)-packages/', '', value)
        return re.sub(r'(\btorch/\S+\.py):\d+', r'\1', value)
    return value


def differing(left, right, place=''):
    """Paths at which two records differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            yield from differing(left.get(key, 'missing'),
                                 right.get(key, 'missing'), f'{place}.{key}')
    elif isinstance(left, list) and isinstance(right, list) and (
            len(left) == len(right)):
        for index, pair in enumerate(zip(left, right)):
            yield from differing(*pair, f'{place}.{index}')
    elif left != right and not (
            (type(left) is type(right) is float
             or place.rpartition('.')[2] in MEASURED)
            and left == pytest.approx(right, rel=.01)):
        yield f'{place[1:]}: {left!r} != {right!r}'


def records_of(name):
    result = faults.run(faults.load(
        os.path.join(FAULTS, 'cases', f'{name}.py')))
    return without_places(result.incidents)


@pytest.mark.parametrize('name', CASES)
def test_a_fault_gives_the_same_record(name, tmp_path):
    found = tmp_path / f'{name}.json'
    found.write_text(json.dumps(records_of(name)))
    with open(os.path.join(RECORDS, f'{name}.json')) as file:
        known = json.load(file)
    assert list(differing(known, json.loads(found.read_text()))) == []
    assert len(known) == 1 and known[0]['cause']['code']


def test_a_difference_is_seen():
    one = {'a': [{'source': 'x.py', 'amax': 1., 'n': 1}], 'time': 1}
    for other, where in (
            ({'a': [{'source': 'y.py', 'amax': 1., 'n': 1}]}, 'a.0.source'),
            ({'a': [{'source': 'x.py', 'amax': 1.1, 'n': 1}]}, 'a.0.amax'),
            ({'a': [{'source': 'x.py', 'amax': 1., 'n': 2}]}, 'a.0.n'),
            ({'a': []}, 'a'), ({}, 'a')):
        (said, ) = differing(without_places(one), other)
        assert said.startswith(f'{where}: ')
    assert without_places([
        'to at /a/site-packages/b/c.py:12 and /a/dist-packages/torch/d.py:3'
    ]) == ['to at b/c.py:12 and torch/d.py']


def main():
    for name in CASES:
        with open(os.path.join(RECORDS, f'{name}.json'), 'w') as file:
            json.dump(records_of(name), file, indent=1, sort_keys=True)
            file.write('\n')


if __name__ == '__main__':
    main()
