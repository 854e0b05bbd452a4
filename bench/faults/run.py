"""Train with one fault each, and compare what the log says of its origin.

``python bench/faults/run.py [CASE ...]`` prints a table. A case is a file in
``cases/``: what the fault is, and where the first non-finite number that
reaches a loss or a gradient comes from by the text of the hosts' code. Its
``step`` is the forward in which that number comes up; with ``accumulate`` the
log tells of it where the window of that forward ends. A column passes where
95 % of what the cases say of it is so.
"""
import argparse
import copy
import glob
import linecache
import logging
import os
import sys
import tempfile
import warnings
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.optim import build_optim_wrapper
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import families  # noqa: E402  beside this folder
from inject import BEFORE_UPDATE, config_of, inject  # noqa: E402

from mmdet_nanfix.records import read_log  # noqa: E402

__all__ = ['COLUMNS', 'load', 'run', 'score', 'setup']

CASES = os.path.join(HERE, 'cases')
COLUMNS = ('found', 'head', 'phase', 'operation', 'source', 'image')
PASS = 95.
Case = Dict[str, Any]
Incident = Dict[str, Any]
_DEFAULTS = dict(precision='float16', loss_scale=64., step=2, accumulate=1,
                 samples=2, optimizer=dict(type='SGD', lr=1e-4), nanfix={},
                 config={})


def load(path: str) -> Case:
    """A case by its file."""
    return {**_DEFAULTS, **Config.fromfile(path).to_dict()}


def setup(case: Case) -> Tuple[nn.Module, Any, Dict[str, Any]]:
    """Detector, optimizer wrapper and batch of a case, the fault not in."""
    torch.manual_seed(0)
    model = families.build(case['family'], config_of(case))
    settings = dict(case['nanfix'])
    if case['fault']['kind'] == 'settings':
        settings.update(case['fault']['values'])
    wrapper = dict(type='NanSafeOptimWrapper', nanfix=settings,
                   accumulative_counts=case['accumulate'],
                   optimizer=case['optimizer'])
    if case['precision'] != 'float32':
        wrapper.update(type='NanSafeAmpOptimWrapper',
                       dtype=case['precision'],
                       loss_scale=case['loss_scale'])
    batch = families.batch_for(model)
    if case['samples'] == 1:
        batch = {key: values[:1] for key, values in batch.items()}
    for index, sample in families.samples_of(batch):
        sample.set_metainfo(dict(img_path=f'img{index}.jpg', img_id=index))
    return model, build_optim_wrapper(model, wrapper), batch


def steps(case: Case, model: nn.Module, wrapper: Any,
          batch: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
    """Yield the batch of each forward, the fault let in when it is time.

    To the end of the window of the step in which it shows.
    """
    fault = case['fault']
    enters = case['step'] - (fault['kind'] in BEFORE_UPDATE)
    for step in range(1, window_end(case) + 1):
        # As in a Runner: iterations that are done.
        MessageHub.get_current_instance().update_info('iter', step - 1)
        now = copy.deepcopy(batch)
        if step == enters:
            inject(fault, model, wrapper, now)
        yield now


def window_end(case: Case) -> int:
    """The iteration that the log says: where its window is decided on."""
    return -(-case['step'] // case['accumulate']) * case['accumulate']


def run(case: Case) -> List[Incident]:
    """Train with the fault, to the step in which it shows.

    Args:
        case: Of :func:`load`.

    Returns:
        The incidents in the log.
    """
    with tempfile.TemporaryDirectory() as folder:
        logger = MMLogger.get_instance(
            os.path.basename(folder), log_level='ERROR',
            log_file=os.path.join(folder, 'run.log'))
        try:
            model, wrapper, batch = setup(case)
            for now in steps(case, model, wrapper, batch):
                model.train_step(now, wrapper)
        finally:
            for handler in list(logger.handlers):
                if isinstance(handler, logging.FileHandler):
                    handler.close()
                    logger.removeHandler(handler)
        log = os.path.join(folder, 'nanfix', 'incidents.jsonl')
        return list(read_log(log)) if os.path.exists(log) else []


def first(case: Case, incidents: Sequence[Incident]) -> Optional[Incident]:
    """The incident of the step in which the fault shows, if the first."""
    if incidents and incidents[0]['iter'] == window_end(case):
        return incidents[0]
    return None


def _any_of(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _source_is(expect: Dict[str, Any], source: Optional[str]) -> bool:
    """Whether ``file:line`` is a line with the text that is expected."""
    path, _, number = (source or '').rpartition(':')
    if os.path.basename(path) != expect['file'] or not number.isdigit():
        return False
    text = linecache.getline(path, int(number))
    return any(part in text for part in _any_of(expect.get('line', '')))


def _image_is(expect: Dict[str, Any], images: Any) -> bool:
    """Whether the first blamed image, and annotation, is the one."""
    if expect['image'] is None:
        return not images
    if not images or images[0]['img_id'] != expect['image']:
        return False
    if expect.get('annotation') is None:
        return True
    annotation = images[0]['annotation'] or {}
    return annotation.get('index') == expect['annotation']


def score(case: Case, incidents: Sequence[Incident]
          ) -> Dict[str, Optional[bool]]:
    """Compare what was found with what is expected.

    Args:
        case: Of :func:`load`.
        incidents: Of :func:`run`.

    Returns:
        By column; None where the expectation does not say. Of the sources
        and operations, None in the expectation says nothing; a head or an
        image that is None there must be null in the log.
    """
    expect = case['expect']
    incident = first(case, incidents)
    where = incident['where'] if incident else {}
    said: Dict[str, Optional[bool]] = {
        'found': incident is not None,
        'head': where.get('head') in _any_of(expect['head'])
        if 'head' in expect else None,
        'phase': where.get('phase') == expect['phase'],
        'operation': where.get('op') in _any_of(expect['op'])
        if expect.get('op') else None,
        'source': _source_is(expect, where.get('source'))
        if expect.get('file') else None,
        'image': _image_is(expect, incident['images'] if incident else None)
        if 'image' in expect else None,
    }
    if incident is None:
        return {column: ok if ok is None else False
                for column, ok in said.items()}
    return said


def _got(incidents: Sequence[Incident], case: Case) -> Dict[str, str]:
    """What the log says, for the cells that are not as expected."""
    incident = first(case, incidents)
    if incident is None:
        return dict.fromkeys(COLUMNS, '') | {'found': ', '.join(
            f'step {item["iter"]}' for item in incidents) or 'none'}
    where = incident['where']
    images = [f'{image["img_id"]}' + (
        f' box {image["annotation"]["index"]}' if image['annotation'] else '')
        for image in incident['images'] or []]
    return {'found': '', 'head': where['head'], 'phase': where['phase'],
            'operation': where['op'], 'image': ', '.join(images) or None,
            'source': os.path.basename(where['source'] or '') or None}


def row(name: str, case: Case, incidents: Sequence[Incident]) -> str:
    """One markdown row."""
    got = _got(incidents, case)
    cells = ['-' if ok is None else 'ok' if ok else f'**{got[column]}**'
             for column, ok in score(case, incidents).items()]
    return f'| {name} | {" | ".join(cells)} |'


def shares(scores: Sequence[Dict[str, Optional[bool]]]) -> List[float]:
    """Percentage of each column, of the cases that say something of it."""
    out = []
    for column in COLUMNS:
        said = [one[column] for one in scores if one[column] is not None]
        out.append(100. * sum(map(bool, said)) / len(said) if said else 100.)
    return out


def paths(names: Sequence[str]) -> Dict[str, str]:
    """Files by case; all of them for no names."""
    known = {os.path.basename(path)[:-len('.py')]: path
             for path in sorted(glob.glob(os.path.join(CASES, '*.py')))}
    for name in names:
        if name not in known:
            print(f'run.py: there is no case {name!r}', file=sys.stderr)
            sys.exit(2)
    return {name: known[name] for name in names or known}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run cases and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('names', nargs='*', metavar='CASE',
                        help='files in cases/, without .py')
    chosen = paths(parser.parse_args(argv).names)
    MMLogger.get_current_instance().setLevel('ERROR')
    warnings.simplefilter('ignore')
    print('| case | found in the same step | head | phase | operation | '
          'source | image |')
    print('|---' * (len(COLUMNS) + 1) + '|')
    scores = []
    for name, path in chosen.items():
        case = load(path)
        incidents = run(case)
        scores.append(score(case, incidents))
        print(row(name, case, incidents), flush=True)
    found = shares(scores)
    print(f'| {len(scores)} cases | '
          f'{" | ".join(f"{share:.0f} %" for share in found)} |')
    return 0 if min(found) >= PASS else 1


if __name__ == '__main__':
    sys.exit(main())
