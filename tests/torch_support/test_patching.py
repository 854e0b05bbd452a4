from __future__ import annotations

import gc
import threading
import types

import pytest
from torch import nn

from mmdet_nanfix.torch_support.patching import Patches, Replaced, replaced


class Base:

    def speak(self):
        return 'base'

    @staticmethod
    def still():
        return 'still'


class Derived(Base):
    pass


def saying(text):
    """Make a wrapper that adds a text."""

    def make(original):
        return lambda *args: f'{text}({original(*args)})'

    return make


@pytest.fixture(autouse=True)
def nothing_is_left():
    # Wrappers of other tests hold some until they are freed.
    gc.collect()
    before = replaced()
    yield
    assert replaced() == before
    assert Base().speak() == Derived().speak() == 'base'


def test_a_class_a_module_and_an_object():
    module, layer = types.ModuleType('some'), nn.Linear(1, 1)
    module.name = 'before'
    raw = vars(Base)['still']
    with Patches('test') as patches:
        patches.replace(module, 'name', 'after')
        patches.replace(layer, 'forward', lambda x: 'mine')
        patches.wrap(Base, 'speak', saying('a'))
        patches.replace(Base, 'still', staticmethod(lambda: 'moved'))
        assert replaced()[-4:] == [
            Replaced('test', module, 'name'),
            Replaced('test', layer, 'forward'),
            Replaced('test', Base, 'speak'), Replaced('test', Base, 'still')]
        assert (module.name, layer(1), Derived().speak(), Base.still()) == (
            'after', 'mine', 'a(base)', 'moved')
    assert module.name == 'before' and 'forward' not in vars(layer)
    assert vars(Base)['still'] is raw


@pytest.mark.parametrize('place', [Derived, Derived()])
def test_what_is_inherited_is_deleted_again(place):
    patches = Patches('test')
    patches.wrap(place, 'speak', saying('mine'))
    thing = place() if isinstance(place, type) else place
    assert thing.speak() == 'mine(base)'
    patches.replace(place, 'new', 1)
    patches.undo()
    patches.undo()
    assert not {'speak', 'new'} & set(vars(place))


def test_the_same_attribute_twice_is_undone_in_reverse_order():
    with Patches('test') as patches:
        patches.wrap(Base, 'speak', saying('a'))
        patches.wrap(Base, 'speak', saying('b'))
        assert Base().speak() == 'b(a(base))'
        with Patches('other') as other:
            other.wrap(Base, 'speak', saying('c'))
            assert Base().speak() == 'c(b(a(base)))'
        assert Base().speak() == 'b(a(base))'


def test_what_is_undone_in_the_middle_leaves_no_trace():
    first, second, third = (Patches(name) for name in 'abc')
    for patches, text in ((first, 'a'), (second, 'b'), (third, 'c')):
        patches.wrap(Base, 'speak', saying(text))
    second.undo()
    assert Base().speak() == 'c(a(base))'
    first.undo()
    assert Base().speak() == 'c(base)'
    third.undo()


def test_the_innermost_comes_below_whatever_is_there():
    outer, inner, nested = Patches('a'), Patches('b', True), Patches('c')
    outer.wrap(Derived, 'speak', saying('a'))
    seen = [Derived.speak]
    for _ in range(2):
        inner.wrap(Derived, 'speak', saying('b'))
        assert Derived().speak() == 'a(b(base))'
        inner.undo()
        seen.append(Derived.speak)
    # Compiled code is compiled once.
    assert len(set(seen)) == 1
    inner.wrap(Derived, 'speak', saying('b'))
    nested.wrap(Derived, 'speak', saying('c'))
    inner.undo()
    assert Derived().speak() == 'c(a(base))'
    outer.undo()
    nested.undo()
    assert 'speak' not in vars(Derived)


def test_a_strangers_replacement_is_kept(monkeypatch):
    outer, inner, last = Patches('a'), Patches('b', True), Patches('c')
    outer.wrap(Derived, 'speak', saying('a'))
    below = Derived.speak
    stranger = saying('stranger')(below)
    monkeypatch.setattr(Derived, 'speak', stranger)
    inner.wrap(Derived, 'speak', saying('b'))
    assert Derived.speak is stranger
    inner.undo()
    last.wrap(Derived, 'speak', saying('c'))
    assert Derived().speak() == 'c(stranger(a(base)))'
    last.undo()
    assert Derived.speak is stranger
    monkeypatch.undo()
    outer.undo()


def test_a_maker_that_changes_nothing_and_one_that_raises():
    with Patches('test') as patches:
        patches.wrap(Base, 'speak', lambda original: original)
        with pytest.raises(ZeroDivisionError):
            patches.wrap(Base, 'speak', lambda original: 1 / 0)
        assert not [what for what in replaced() if what.owner == 'test']
        with pytest.raises(TypeError):
            patches.replace(object(), 'x', 1)


def test_threads():
    """Whatever order they end in, nothing is left."""
    errors = []

    def run(text):
        try:
            for _ in range(200):
                with Patches(text, innermost=text == 'a') as patches:
                    patches.wrap(Base, 'speak', saying(text))
                    assert f'{text}(' in Base().speak()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(text, )) for text in 'abc']
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_patches_are_held_by_who_needs_them():
    class Owner:
        pass

    place = types.SimpleNamespace(name=1)
    patches = Patches('test')
    one, two = Owner(), Owner()
    patches.hold(one)
    patches.replace(place, 'name', 2)
    patches.hold(two)
    del one
    gc.collect()
    assert place.name == 2
    del two
    gc.collect()
    assert place.name == 1 and 'test' not in {
        item.owner for item in replaced()}
    # And again.
    three = Owner()
    patches.hold(three)
    patches.replace(place, 'name', 3)
    assert place.name == 3
    del three
    gc.collect()
    assert place.name == 1
