from __future__ import annotations

from helpers.runs import Unknown
from torch import nn

from mmdet_nanfix.guard.state.snapshot import Snapshot


def test_nothing_changed():
    changes = Snapshot.of([Unknown()]).diff()
    assert changes.names == [] and changes.elements == []


def test_what_somebody_else_has_changed_since_is_left():
    model = Unknown()
    picture = Snapshot.of([model])
    model.counter, model.history[0] = 1, 5.
    model.fresh = 1
    changes = picture.diff()
    assert {name for _, name, *_ in changes.names} == {'counter', 'fresh'}
    model.counter = 2
    model.history.append('by a hook')
    changes.revert()
    assert model.counter == 2 and not hasattr(model, 'fresh')
    assert model.history == [5., [2.], 'by a hook']


def test_what_is_beside_is_not_looked_at():
    inner = Unknown()
    model = nn.Sequential(inner)
    whole, part = Snapshot.of([model]), Snapshot.of([model], besides=[inner])
    assert len(whole.tensors) > 3 and part.tensors == []


def test_parameters_where_they_are_asked_for():
    model = nn.Linear(1, 1)
    assert Snapshot.of([model]).tensors == []
    assert len(Snapshot.of([model], parameters=True).tensors) == 2
