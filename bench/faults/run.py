"""Train with one fault each, and compare what the log says of it.

``python bench/faults/run.py [CASE ...]`` prints a table. A case is a file in
``cases/``: what the fault is, where the first non-finite number that reaches
a loss or a gradient comes from by the text of the hosts' code, what causes it
and what is to be done. Its ``step`` is the forward in which that number comes
up; with ``accumulate`` the log tells of it where the window of that forward
ends. A column passes where 95 % of what the cases say of it is so.

Three columns need no expectation. Patch: the change of the config that the
log proposes, pasted into the config of a new training, leaves no incident.
State intact: a skipped step leaves weights, buffers and the optimizer as they
were, bit for bit; any other leaves nothing non-finite. Survived: two more
steps, on good data, raise nothing and spoil nothing, and are accepted where
the fault was in one batch.
"""
from __future__ import annotations

import argparse
import copy
import dataclasses
import glob
import linecache
import logging
import os
import sys
import tempfile
import warnings
from typing import Any, Dict, Iterator, Sequence

import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.optim import build_optim_wrapper
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), 'lib'))

import families  # noqa: E402  beside this folder
from inject import BEFORE_UPDATE, config_of, inject  # noqa: E402

from mmdet_nanfix.incidents import read_log  # noqa: E402

__all__ = ['COLUMNS', 'Result', 'is_cured', 'load', 'run', 'score', 'setup']

CASES = os.path.join(HERE, 'cases')
COLUMNS = ('found', 'head', 'phase', 'operation', 'source', 'image', 'cause',
           'action', 'patch', 'state', 'survived')
TITLES = ('found in the same step', *COLUMNS[1:-2], 'state intact',
          'survived')
PASS = 95.
Case = Dict[str, Any]
Incident = Dict[str, Any]
_DEFAULTS = dict(precision='float16', loss_scale=64., step=2, accumulate=1,
                 samples=2, optimizer=dict(type='SGD', lr=1e-4), nanfix={},
                 config={})
# Kinds of faults that are gone with their batch.
_OF_A_BATCH = ('pixels', 'box', 'label', 'meta')


@dataclasses.dataclass
class Result:
    """What became of a training with a fault.

    Attributes:
        incidents: In the log, to the step in which the fault shows.
        intact: Whether that step left nothing behind.
        survived: Whether the training went on.
        cured: Whether the proposed change of the config leaves no incident;
            None where there is none.
    """

    incidents: list[Incident]
    intact: bool = True
    survived: bool = True
    cured: bool | None = None


def load(path: str) -> Case:
    """A case by its file."""
    return {**_DEFAULTS, **Config.fromfile(path).to_dict()}


def _config(case: Case, patch: str | None) -> Config:
    """Of model and optimizer wrapper, with something pasted into it."""
    settings = dict(case['nanfix'])
    if case['fault']['kind'] == 'settings':
        settings.update(case['fault']['values'])
    cfg = families.config(case['family'], config_of(case))
    wrapper = dict(type='NanSafeOptimWrapper', nanfix=settings,
                   accumulative_counts=case['accumulate'],
                   optimizer=case['optimizer'])
    if case['precision'] != 'float32':
        wrapper.update(type='NanSafeAmpOptimWrapper',
                       dtype=case['precision'],
                       loss_scale=case['loss_scale'])
    cfg = Config(dict(model=cfg.model, optim_wrapper=wrapper))
    if patch is None:
        return cfg
    with tempfile.TemporaryDirectory() as folder:
        cfg.dump(os.path.join(folder, 'base.py'))
        path = os.path.join(folder, 'patched.py')
        with open(path, 'w') as file:
            file.write(f"_base_ = ['base.py']\n{patch}\n")
        return Config.fromfile(path)


def setup(case: Case, patch: str | None = None
          ) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Detector, optimizer wrapper and batch of a case, the fault not in."""
    torch.manual_seed(0)
    cfg = _config(case, patch)
    model = families.build_from(cfg)
    batch = families.batch_for(model)
    if case['samples'] == 1:
        batch = {key: values[:1] for key, values in batch.items()}
    for index, sample in families.samples_of(batch):
        sample.set_metainfo(dict(img_path=f'img{index}.jpg', img_id=index))
    return model, build_optim_wrapper(model, cfg.optim_wrapper), batch


def steps(case: Case, model: nn.Module, wrapper: Any,
          batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
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


def run(case: Case, further: bool = False) -> Result:
    """Train with the fault, to the step in which it shows.

    Args:
        case: Of :func:`load`.
        further: Train on for two steps, and try the proposed change.
    """
    result = _train(case, None, further)
    incident = first(case, result.incidents)
    patch = ((incident or {}).get('cause') or {}).get('config_patch')
    if further and patch is not None:
        result.cured = is_cured(case, patch)
    return result


def is_cured(case: Case, patch: str) -> bool:
    """Whether it trains with a patch in the config, without an incident."""
    try:
        return not _train(case, patch, False).incidents
    except Exception as error:
        print(f'run.py: with {patch!r}: {error!r}', file=sys.stderr)
        return False


def _train(case: Case, patch: str | None, further: bool) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        logger = MMLogger.get_instance(
            os.path.basename(folder), log_level='ERROR',
            log_file=os.path.join(folder, 'run.log'))
        log = os.path.join(folder, 'nanfix', 'incidents.jsonl')
        try:
            model, wrapper, batch = setup(case, patch)
            end = _State(model, wrapper)
            for now in steps(case, model, wrapper, batch):
                end.look()
                model.train_step(now, wrapper)
            result = Result(list(read_log(log)) if os.path.exists(log) else (
                []))
            if further:
                incident = first(case, result.incidents)
                result.intact = end.is_intact(incident)
                result.survived = end.survives(case, batch)
        finally:
            for handler in list(logger.handlers):
                if isinstance(handler, logging.FileHandler):
                    handler.close()
                    logger.removeHandler(handler)
    return result


class _State:
    """Weights, buffers and optimizer around the step of an incident."""

    def __init__(self, model: nn.Module, wrapper: Any) -> None:
        self._model, self._wrapper = model, wrapper
        self._before: dict[str, torch.Tensor] = {}

    def _now(self) -> dict[str, torch.Tensor]:
        state = dict(self._model.state_dict())
        names = {id(parameter): name for name, parameter
                 in self._model.named_parameters()}
        for parameter, held in self._wrapper.optimizer.state.items():
            state.update({
                f'{names.get(id(parameter))} {key}': value
                for key, value in held.items()
                if isinstance(value, torch.Tensor)})
        return {name: value.detach().clone()
                for name, value in state.items()}

    def look(self) -> None:
        """Before a forward: buffers as the window began with them."""
        now = self._now()
        if self._wrapper.window_open:
            now.update({name: self._before[name] for name, _
                        in self._model.named_buffers() if name in now})
        self._before = now

    def _spoiled(self) -> bool:
        """Whether something is not finite that was."""
        return any(
            value.is_floating_point() and not value.isfinite().all()
            and (name not in self._before
                 or bool(self._before[name].isfinite().all()))
            for name, value in self._now().items())

    def is_intact(self, incident: Incident | None) -> bool:
        """Whether the step left nothing behind."""
        if incident is None or incident['action'] != 'skipped':
            return incident is not None and not self._spoiled()
        now = self._now()
        return now.keys() == self._before.keys() and all(
            torch.equal(value.nan_to_num(), self._before[name].nan_to_num())
            and torch.equal(value.isnan(), self._before[name].isnan())
            for name, value in now.items())

    def survives(self, case: Case, batch: dict[str, Any]) -> bool:
        """Train on for two steps without the fault."""
        guard = self._wrapper.arm(self._model)
        # What comes of it is not looked into.
        guard.diagnosis.stop_replaying()
        hub = MessageHub.get_current_instance()
        for count in range(2 * case['accumulate']):
            hub.update_info('iter', window_end(case) + count)
            self._model.train_step(copy.deepcopy(batch), self._wrapper)
        if self._spoiled():
            return False
        return case['fault']['kind'] not in _OF_A_BATCH or (
            guard.stop.consecutive == 0)


def first(case: Case, incidents: Sequence[Incident]) -> Incident | None:
    """The incident of the step in which the fault shows, if the first."""
    if incidents and incidents[0]['iter'] == window_end(case):
        return incidents[0]
    return None


def _any_of(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _source_is(expect: dict[str, Any], source: str | None) -> bool:
    """Whether ``file:line`` is a line with the text that is expected."""
    path, _, number = (source or '').rpartition(':')
    if os.path.basename(path) != expect['file'] or not number.isdigit():
        return False
    text = linecache.getline(path, int(number))
    return any(part in text for part in _any_of(expect.get('line', '')))


def _image_is(expect: dict[str, Any], images: Any) -> bool:
    """Whether the first blamed image, and annotation, is the one."""
    if expect['image'] is None:
        return not images
    if not images or images[0]['img_id'] != expect['image']:
        return False
    if expect.get('annotation') is None:
        return True
    annotation = images[0]['annotation'] or {}
    return annotation.get('index') == expect['annotation']


def score(case: Case, result: Result) -> dict[str, bool | None]:
    """Compare what was found with what is expected.

    Args:
        case: Of :func:`load`.
        result: Of :func:`run`.

    Returns:
        By column; None where the expectation does not say. Of the sources
        and operations, None in the expectation says nothing; a head or an
        image that is None there must be null in the log.
    """
    expect = case['expect']
    incident = first(case, result.incidents)
    where = incident['where'] if incident else {}
    cause = (incident['cause'] or {}).get('code') if incident else None
    said: dict[str, bool | None] = {
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
        'cause': cause in _any_of(expect['cause']),
        'action': (incident or {}).get('action') in _any_of(
            expect['action']),
        'patch': result.cured,
        'state': result.intact,
        'survived': result.survived,
    }
    if incident is None:
        return {column: ok if ok is None else False
                for column, ok in said.items()}
    return said


def _got(case: Case, result: Result) -> dict[str, str]:
    """What the log says, for the cells that are not as expected."""
    incident = first(case, result.incidents)
    if incident is None:
        return dict.fromkeys(COLUMNS, '') | {'found': ', '.join(
            f'step {item["iter"]}' for item in result.incidents) or 'none'}
    where = incident['where']
    images = [f'{image["img_id"]}' + (
        f' box {image["annotation"]["index"]}' if image['annotation'] else '')
        for image in incident['images'] or []]
    return {'found': '', 'head': where['head'], 'phase': where['phase'],
            'operation': where['op'], 'image': ', '.join(images) or None,
            'source': os.path.basename(where['source'] or '') or None,
            'cause': (incident['cause'] or {}).get('code'),
            'action': incident['action'], 'patch': 'no cure',
            'state': 'changed', 'survived': 'no'}


def row(name: str, case: Case, result: Result) -> str:
    """One markdown row."""
    got = _got(case, result)
    cells = ['-' if ok is None else 'ok' if ok else f'**{got[column]}**'
             for column, ok in score(case, result).items()]
    return f'| {name} | {" | ".join(cells)} |'


def shares(scores: Sequence[dict[str, bool | None]]) -> list[float]:
    """Percentage of each column, of the cases that say something of it."""
    out = []
    for column in COLUMNS:
        said = [one[column] for one in scores if one[column] is not None]
        out.append(100. * sum(map(bool, said)) / len(said) if said else 100.)
    return out


def paths(names: Sequence[str]) -> dict[str, str]:
    """Files by case; all of them for no names."""
    known = {os.path.basename(path)[:-len('.py')]: path
             for path in sorted(glob.glob(os.path.join(CASES, '*.py')))}
    for name in names:
        if name not in known:
            print(f'run.py: there is no case {name!r}', file=sys.stderr)
            sys.exit(2)
    return {name: known[name] for name in names or known}


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('names', nargs='*', metavar='CASE',
                        help='files in cases/, without .py')
    chosen = paths(parser.parse_args(argv).names)
    MMLogger.get_current_instance().setLevel('ERROR')
    warnings.simplefilter('ignore')
    print(f'| case | {" | ".join(TITLES)} |')
    print('|---' * (len(COLUMNS) + 1) + '|')
    scores = []
    for name, path in chosen.items():
        case = load(path)
        result = run(case, further=True)
        scores.append(score(case, result))
        print(row(name, case, result), flush=True)
    found = shares(scores)
    print(f'| {len(scores)} cases | '
          f'{" | ".join(f"{share:.0f} %" for share in found)} |')
    return 0 if min(found) >= PASS else 1


if __name__ == '__main__':
    sys.exit(main())
