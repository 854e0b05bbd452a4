from __future__ import annotations

import pytest
import torch
from families import batch_for, build
from torch import nn

from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.fp32 import PrecisionControl
from mmdet_nanfix.fp32.wrapping import SWITCH


class Layer(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)


class Head(nn.Module):
    """Is called by its methods, as MMDetection's are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def loss(self, x):
        return self.inner(x) + nn.functional.linear(x, x)

    def inner(self, x):
        return self.layers[0](x)


class Model(nn.Module):

    def __init__(self):
        super().__init__()
        self.first = Head()
        self.second = Head()


def dtypes(model, control, x=None):
    """Of what each head gives, and a layer of it called from outside."""
    x = torch.ones(2, 2) if x is None else x
    with cuda_autocast(), control.active():
        return [str(out.dtype)[6:] for out in (
            model.first.loss(x), model.second.loss(x),
            model.second.layers[1](x))]


def test_one_part_and_all_that_is_called_of_it():
    model = Model()
    control = PrecisionControl(model, None, 'cpu')
    half = ['float16'] * 3
    assert dtypes(model, control) == half
    with control.with_extra(['second']):
        assert control.extra == ('second', )
        assert dtypes(model, control) == ['float16', 'float32', 'float32']
        # Half inputs come in as fp32 copies.
        assert dtypes(model, control, torch.ones(2, 2).half())[1] == (
            'float32')
    assert control.extra == () and dtypes(model, control) == half
    with control.with_extra(['second.layers.1']):
        assert dtypes(model, control) == ['float16', 'float16', 'float32']


def test_parts_that_stay_so():
    model, promoted = Model(), ['first']
    control = PrecisionControl(model, 'heads', 'cpu', promoted)
    assert dtypes(model, control)[0] == 'float32'
    control.promoted = ['first', 'second']
    assert dtypes(model, control) == ['float32'] * 3
    # Outside of a step all is as it was.
    with cuda_autocast():
        assert model.first.loss(torch.ones(2, 2)).dtype == torch.float16


def test_nothing_is_left_on_the_modules():
    model = Model()
    before = {name: set(vars(module)) for name, module
              in model.named_modules()}
    control = PrecisionControl(model, None, 'cpu', ['first'])
    dtypes(model, control)
    assert before == {name: set(vars(module)) for name, module
                      in model.named_modules()}


@pytest.mark.parametrize('mode, more, wanted', [
    (None, ['losses'], 'losses'), (None, ['heads'], 'heads'),
    ('losses', ['heads'], 'heads'), ('heads', ['losses'], 'heads'),
    ('losses', ['all'], 'losses'), (None, ['bfloat16'], None)])
def test_modes_that_are_asked_for(mode, more, wanted):
    control = PrecisionControl(Model(), mode, 'cpu')
    with control.with_extra(more), control.active():
        assert SWITCH.mode == wanted
    assert SWITCH.parts == frozenset()


def test_a_name_that_is_no_module():
    with pytest.raises(ValueError, match='`fp32_modules` to name modules of '
                       "the Model, but it has no 'third'; it has first, "
                       'second and below'):
        PrecisionControl(Model(), None, 'cpu', ['third'])
    known = PrecisionControl(Model(), None, 'cpu').known
    assert {'first', 'second', 'losses'} <= known and 'third' not in known


@pytest.mark.parametrize('name', ['losses', 'heads', 'all', 'bfloat16'])
def test_a_setting_names_parts_and_no_precision(name):
    with pytest.raises(ValueError, match='fp32_modules'):
        PrecisionControl(Model(), None, 'cpu', [name])


def test_wrapping_twice_is_wrapping_once():
    """Regions and parts, in any order."""
    model = build('retinanet')
    control = PrecisionControl(model, 'heads', 'cpu')
    kind = type(model.bbox_head)
    with control.with_extra(['bbox_head']), control.active():
        pass
    once = {name: vars(base).get(name) for base in kind.__mro__
            for name in vars(base)}
    again = PrecisionControl(model, 'heads', 'cpu')
    with again.with_extra(['bbox_head', 'losses']), again.active():
        pass
    assert once == {name: vars(base).get(name) for base in kind.__mro__
                    for name in vars(base)}


def test_a_part_of_a_detector_is_in_fp32_with_its_losses():
    model = build('retinanet')
    control = PrecisionControl(model, None, 'cpu')
    batch = model.data_preprocessor(batch_for(model), True)
    seen = {}

    def look(name):
        def note(module, inputs, output):
            seen.setdefault(name, output.dtype)

        return note

    handles = [module.register_forward_hook(look(name)) for name, module in (
        ('head', model.bbox_head.retina_cls),
        ('neck', model.neck.fpn_convs[0].conv))]
    with cuda_autocast(), control.with_extra(['bbox_head']), control.active():
        model(**batch, mode='loss')
    for handle in handles:
        handle.remove()
    assert seen == {'head': torch.float32, 'neck': torch.float16}
