from __future__ import annotations

from test_transaction import Unknown
from torch import nn

from mmdet_nanfix.picture import Picture


def test_nothing_changed():
    changes = Picture.of([Unknown()]).changes()
    assert changes.names == [] and changes.elements == []


def test_what_somebody_else_has_changed_since_is_left():
    model = Unknown()
    picture = Picture.of([model])
    model.counter, model.history[0] = 1, 5.
    model.fresh = 1
    changes = picture.changes()
    assert {name for _, name, *_ in changes.names} == {'counter', 'fresh'}
    model.counter = 2
    model.history.append('by a hook')
    changes.take_back()
    assert model.counter == 2 and not hasattr(model, 'fresh')
    assert model.history == [5., [2.], 'by a hook']


def test_what_is_beside_is_not_looked_at():
    inner = Unknown()
    model = nn.Sequential(inner)
    whole, part = Picture.of([model]), Picture.of([model], besides=[inner])
    assert len(whole.tensors) > 3 and part.tensors == []


def test_parameters_where_they_are_asked_for():
    model = nn.Linear(1, 1)
    assert Picture.of([model]).tensors == []
    assert len(Picture.of([model], parameters=True).tensors) == 2
