from __future__ import annotations

import os

import pytest
import torch
from helpers.incidents import incident
from mmengine.logging import MMLogger
from torch import nn

from mmdet_nanfix.guard.rules import StopRule
from mmdet_nanfix.hosts.mmengine import reporter
from mmdet_nanfix.hosts.mmengine.reporter import IncidentReporter
from mmdet_nanfix.incidents import read_log


def journal_in(tmp_path):
    (tmp_path / 'run').mkdir(exist_ok=True)
    MMLogger.get_instance(f'{tmp_path}', log_file=str(
        tmp_path / 'run' / 'run.log'))
    journal = IncidentReporter(StopRule())
    journal.open()
    return journal


def test_the_log_is_where_the_current_logger_writes(tmp_path, said):
    journal = journal_in(tmp_path)
    journal.report(incident())
    assert journal.path == str(
        tmp_path / 'run' / 'nanfix' / 'incidents.jsonl')
    assert [record['iter'] for record in read_log(journal.path)] == [7]
    journal.close(128.)
    journal.close(128.)


def test_nothing_is_said_of_a_run_without_incidents(said):
    journal = IncidentReporter(StopRule())
    journal.close(1.)
    assert said() == [] and journal.path is None


def test_weights_are_saved_with_what_is_wrong_with_them(tmp_path):
    journal = journal_in(tmp_path)
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(float('inf'))
    told = journal.save_weights(model, 3, 20, {})
    assert '1 tensors in it are not finite: running_mean' in told
    saved = torch.load(tmp_path / 'run' / 'nanfix' / 'stopped_iter_20.pth',
                       weights_only=True)
    assert saved['meta']['epoch'] == 2
    message = journal.stop_message('enough', told)
    assert 'enough' in message and 'max_consecutive=None' in message


def test_without_a_folder_nothing_is_saved():
    journal = IncidentReporter(StopRule())
    assert journal.save_weights(nn.Linear(1, 1), None, 1, {}) == (
        'No weights were saved, since no log folder is known.')


@pytest.mark.parametrize('error', [
    OSError(28, 'No space left on device'),
    RuntimeError('PytorchStreamWriter failed writing file')])
def test_weights_are_saved_whole_or_not_at_all(tmp_path, monkeypatch, error):
    journal = journal_in(tmp_path)

    def torn(checkpoint, path):
        with open(path, 'w') as file:
            file.write('half of it')
        raise error

    monkeypatch.setattr(reporter, 'save_checkpoint', torn)
    told = journal.save_weights(nn.Linear(1, 1), None, 7, {})
    assert told == f'The weights could not be saved ({error}).'
    assert not list((tmp_path / 'run' / 'nanfix').glob('*pth*'))


def test_the_log_folder_is_the_runners_own(tmp_path):
    """Not that of a logger, which two runs of one name share."""
    journal = journal_in(tmp_path)
    other = IncidentReporter(StopRule())
    other.folder = str(tmp_path / 'other')
    other.open()
    assert os.path.dirname(other.path) == str(tmp_path / 'other' / 'nanfix')
    assert other.path != journal.path
