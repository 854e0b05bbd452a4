from __future__ import annotations

import math

import torch
from torch import nn

from mmdet_nanfix.diagnosis.parts import ModelParts
from mmdet_nanfix.guard.checks import loss_terms


class Cascade(nn.Module):
    """The module tree of a cascade detector."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(2, 2)
        self.rpn_head = nn.Linear(2, 1)
        self.roi_head = nn.Module()
        self.roi_head.glue = nn.Linear(2, 2)
        self.roi_head.bbox_head = nn.ModuleList(
            [nn.Linear(2, 1), nn.Linear(2, 1)])
        self.roi_head.mask_head = nn.Sequential(nn.Linear(2, 2),
                                                nn.Linear(2, 1))


def test_parts_follow_the_module_tree():
    parts = ModelParts(Cascade())
    owners = {name: parts.owner_of_name(name)
              for name, _ in parts.parameters if name.endswith('weight')}
    assert owners == {
        'backbone.weight': 'backbone',
        'rpn_head.weight': 'rpn_head',
        'roi_head.glue.weight': 'roi_head.glue',
        'roi_head.bbox_head.0.weight': 'roi_head.bbox_head.0',
        'roi_head.bbox_head.1.weight': 'roi_head.bbox_head.1',
        'roi_head.mask_head.0.weight': 'roi_head.mask_head',
        'roi_head.mask_head.1.weight': 'roi_head.mask_head',
    }


def test_parts_of_a_wrapped_detector():
    model = nn.Module()
    model.student, model.teacher = Cascade(), Cascade()
    for parameter in model.teacher.parameters():
        parameter.requires_grad_(False)
    parts = ModelParts(model)
    assert parts.owner_of_name('student.rpn_head.bias') == 'student.rpn_head'
    state = parts.state({}, ['student.rpn_head.bias'])
    assert not any(name.startswith('teacher') for name in state)
    assert state['student.rpn_head'].bad_grads == ['student.rpn_head.bias']
    assert state['student.rpn_head'].n_params == 2


def test_losses_are_owned_by_the_nearest_parameter():
    model = Cascade()
    parts = ModelParts(model)
    x = model.backbone(torch.randn(3, 2))
    y = model.roi_head.glue(x)
    losses = loss_terms({
        # Names that say nothing, or the wrong thing.
        'loss_mask': model.rpn_head(x).sum() * 0,
        's0.loss_cls': [model.roi_head.bbox_head[0](y).mean()] * 2,
        's1.loss_cls': model.roi_head.bbox_head[1](y).mean() * math.nan,
        'rpn_loss': model.roi_head.mask_head(y).mean(),
        'loss_constant': torch.tensor(2.),
        'acc': torch.tensor(math.nan),
        'loss_text': 'not a tensor',
    })
    state = parts.state(losses, [])
    assert {key: name for name, head in state.items()
            for key in head.losses} == {
        'loss_mask': 'rpn_head',
        's0.loss_cls': 'roi_head.bbox_head.0',
        's1.loss_cls': 'roi_head.bbox_head.1',
        'rpn_loss': 'roi_head.mask_head',
        'loss_constant': '?',
    }
    assert state['roi_head.bbox_head.1'].bad_losses == ['s1.loss_cls']
    assert [name for name, head in state.items() if not head.fine] == [
        'roi_head.bbox_head.1']


def test_the_graph_is_known_after_the_backward():
    model = Cascade()
    loss = model.rpn_head(model.backbone(torch.randn(3, 2))).mean()
    loss.backward()
    assert ModelParts(model).owner_of_loss(loss) == 'rpn_head'


def test_level_lists_are_summed_as_the_host_logs_them():
    model = Cascade()
    levels = [torch.ones(2), torch.tensor(3.)]
    state = ModelParts(model).state(loss_terms({'loss_x': levels}), [])
    assert state['?'].losses == {'loss_x': 4.}


def test_losses_are_owned_where_they_were_computed():
    """A mask loss of weights that another head has predicted."""
    parts = ModelParts(Cascade())
    loss = torch.ones(1, requires_grad=True).sum()
    assert 'rpn_head' not in parts.state({'loss_x': [loss]}, []) or (
        not parts.state({'loss_x': [loss]}, [])['rpn_head'].losses)
    parts.note_sites({'loss_x': [None, '', 'roi_head', 'rpn_head']})
    assert parts.state({'loss_x': [loss]}, [])['rpn_head'].losses


def test_bad_weights():
    model = Cascade()
    assert ModelParts(model).bad_weights() == []
    model.rpn_head.requires_grad_(False)
    model.rpn_head.bias.data.fill_(math.inf)
    assert ModelParts(model).bad_weights() == ['rpn_head.bias']
