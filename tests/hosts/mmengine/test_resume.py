from __future__ import annotations

import pickle

import pytest
import torch
from mmengine.logging import HistoryBuffer

from mmdet_nanfix.hosts.mmengine import resume
from mmdet_nanfix.hosts.mmengine.resume import allow_resume

# Pairs of a function and a name are known from 2.6 on, where torch reads
# weights only unless told otherwise.
NAMED = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 6)


class Evil:
    """Asks for an attribute of something else."""

    def __reduce__(self):
        return getattr, (HistoryBuffer, '__init__')


def test_a_torch_that_knows_no_pairs_is_left_alone(monkeypatch):
    """torch 2.4 and 2.5: one pair breaks every load of weights only."""
    given = []
    monkeypatch.setattr(torch.serialization, 'add_safe_globals',
                        given.extend, raising=False)
    monkeypatch.setattr(resume, '_READS_WEIGHTS_ONLY', False)
    allow_resume()
    assert given == []
    monkeypatch.setattr(resume, '_READS_WEIGHTS_ONLY', True)
    allow_resume()
    assert any(isinstance(item, tuple) for item in given)


@pytest.mark.skipif(not NAMED, reason='torch reads anything before 2.6')
def test_histories_are_read_and_nothing_else(tmp_path):
    allow_resume()
    history = HistoryBuffer([1., 2.], [1, 1])
    path = str(tmp_path / 'a.pth')
    torch.save({'message_hub': {'loss': history}}, path)
    loaded = torch.load(path, weights_only=True)['message_hub']['loss']
    assert loaded.mean() == 1.5
    torch.save({'message_hub': Evil()}, path)
    with pytest.raises(pickle.UnpicklingError, match='__init__'):
        torch.load(path, weights_only=True)
