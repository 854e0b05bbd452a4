from __future__ import annotations

import pytest
import torch
from families import batch_for, build
from torch import nn

from mmdet_nanfix import regions
from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.sticky import StickyParts
from mmdet_nanfix.widening import Widening


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


def dtypes(model, widening, x=None):
    """Of what each head gives, and a layer of it called from outside."""
    x = torch.ones(2, 2) if x is None else x
    with cuda_autocast(), widening.switched():
        return [str(out.dtype)[6:] for out in (
            model.first.loss(x), model.second.loss(x),
            model.second.layers[1](x))]


def test_one_part_and_all_that_is_called_of_it():
    model = Model()
    widening = Widening(model, None, 'cpu', StickyParts())
    half = ['float16'] * 3
    assert dtypes(model, widening) == half
    with widening.at(['second']):
        assert widening.more == ('second', )
        assert dtypes(model, widening) == ['float16', 'float32', 'float32']
        # Half inputs come in as fp32 copies.
        assert dtypes(model, widening, torch.ones(2, 2).half())[1] == (
            'float32')
    assert widening.more == () and dtypes(model, widening) == half
    with widening.at(['second.layers.1']):
        assert dtypes(model, widening) == ['float16', 'float16', 'float32']


def test_parts_that_stay_so():
    model, sticky = Model(), StickyParts(['first'])
    widening = Widening(model, 'heads', 'cpu', sticky)
    assert dtypes(model, widening)[0] == 'float32'
    sticky.earned.append('second')
    assert dtypes(model, widening) == ['float32'] * 3
    # Outside of a step all is as it was.
    with cuda_autocast():
        assert model.first.loss(torch.ones(2, 2)).dtype == torch.float16


def test_nothing_is_left_on_the_modules():
    model = Model()
    before = {name: set(vars(module)) for name, module
              in model.named_modules()}
    widening = Widening(model, None, 'cpu', StickyParts(['first']))
    dtypes(model, widening)
    assert before == {name: set(vars(module)) for name, module
                      in model.named_modules()}


@pytest.mark.parametrize('mode, more, wanted', [
    (None, ['losses'], 'losses'), (None, ['heads'], 'heads'),
    ('losses', ['heads'], 'heads'), ('heads', ['losses'], 'heads'),
    ('losses', ['all'], 'losses'), (None, ['bfloat16'], None)])
def test_modes_that_are_asked_for(mode, more, wanted):
    widening = Widening(Model(), mode, 'cpu', StickyParts())
    with widening.at(more), widening.switched():
        assert regions.SWITCH.mode == wanted
    assert regions.SWITCH.parts == frozenset()


def test_a_name_that_is_no_module():
    with pytest.raises(ValueError, match='`fp32_modules` to name modules of '
                       "the Model, but it has no 'third'; it has first, "
                       'second and below'):
        Widening(Model(), None, 'cpu', StickyParts(['third']))
    # Those that a checkpoint has from another model are forgotten.
    sticky = StickyParts(['first'])
    sticky.earned += ['third', 'second', 'losses']
    assert Widening(Model(), None, 'cpu', sticky).forget() == ['third']
    assert sticky.names == ['first', 'second', 'losses']


@pytest.mark.parametrize('name', ['losses', 'heads', 'all', 'bfloat16'])
def test_a_setting_names_parts_and_no_precision(name):
    with pytest.raises(ValueError, match='fp32_modules'):
        Widening(Model(), None, 'cpu', StickyParts([name]))


def test_wrapping_twice_is_wrapping_once():
    """Regions and parts, in any order."""
    model = build('retinanet')
    sticky = StickyParts()
    widening = Widening(model, 'heads', 'cpu', sticky)
    kind = type(model.bbox_head)
    with widening.at(['bbox_head']), widening.switched():
        pass
    once = {name: vars(base).get(name) for base in kind.__mro__
            for name in vars(base)}
    again = Widening(model, 'heads', 'cpu', sticky)
    with again.at(['bbox_head', 'losses']), again.switched():
        pass
    assert once == {name: vars(base).get(name) for base in kind.__mro__
                    for name in vars(base)}


def test_a_part_of_a_detector_is_in_fp32_with_its_losses():
    model = build('retinanet')
    widening = Widening(model, None, 'cpu', StickyParts())
    batch = model.data_preprocessor(batch_for(model), True)
    seen = {}

    def look(name):
        def note(module, inputs, output):
            seen.setdefault(name, output.dtype)

        return note

    handles = [module.register_forward_hook(look(name)) for name, module in (
        ('head', model.bbox_head.retina_cls),
        ('neck', model.neck.fpn_convs[0].conv))]
    with cuda_autocast(), widening.at(['bbox_head']), widening.switched():
        model(**batch, mode='loss')
    for handle in handles:
        handle.remove()
    assert seen == {'head': torch.float32, 'neck': torch.float16}
