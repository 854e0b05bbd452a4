from __future__ import annotations

import torch
from torch import nn

from mmdet_nanfix.fp32.introspect import (
    loss_modules,
    names_in,
    own_codes,
    plain_objects,
    reaches_a_network,
    runs_layers,
    takes_predictions,
)


class Head(nn.Module):

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def loss(self, pred, target):
        return [self.scale(item) for item in pred]

    def scale(self, pred):
        return pred.sigmoid()

    def get_targets(self, feats):
        return self.refine(feats)

    def refine(self, feats):
        return [self.again(feats), self.layer(feats)]

    def again(self, feats):
        return self.refine(feats)


def test_names_in_the_code_of_a_method():
    assert 'scale' in names_in(Head, 'loss')
    assert names_in(Head, 'scale') == {'sigmoid'}
    assert names_in(Head, 'missing') == names_in(Head, 'training') == set()


def test_comprehensions_are_own_code_and_other_functions_not():

    def method(self, items):
        kept = [item.log() for item in items]
        return kept, lambda item: item.exp()

    names = {name for code in own_codes(method) for name in code.co_names}
    assert 'log' in names and 'exp' not in names


def test_layers_that_a_method_runs_through_others():
    head = Head()
    assert runs_layers(head, 'get_targets')
    assert not runs_layers(head, 'scale')
    assert takes_predictions(head)


def test_a_loss_from_predictions():

    class Pure(Head):

        def loss(self, pred, target):
            # Names of methods of any module, too.
            return self.scale(pred.float().to(target)).type(pred) - target

    class Samples(Head):

        def loss(self, pred, batch_data_samples):
            return self.scale(pred)

    class Beside(Pure):

        def loss_by_feat(self, pred):
            return pred

    assert takes_predictions(Pure())
    assert not takes_predictions(Samples())
    assert not takes_predictions(Beside())
    assert not takes_predictions(nn.Linear(1, 1))


def test_modules_that_are_losses():

    class OwnLoss(nn.Module):
        pass

    class WithWeights(OwnLoss):

        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1)

    class Plain(nn.Module):
        pass

    WithWeights.__name__ = 'NetLoss'
    model = nn.Module()
    model.a, model.b = OwnLoss(), WithWeights()
    model.loss_c, model.loss_d = Plain(), nn.Identity()
    model.criterions = nn.ModuleDict({'x': nn.ModuleList([Plain()])})
    model.losses = nn.Sequential(Plain())
    model.e = nn.ModuleList([Plain()])
    assert list(loss_modules(model)) == [
        model.a, model.loss_c, model.criterions['x'][0]]


def test_objects_that_modules_hold():

    class Thing:

        def __init__(self, **held):
            vars(self).update(held)

    class Assigner(Thing):

        def assign(self):
            pass

    model = nn.Module()
    cost, hook = Thing(), Thing()
    model.assigner = Assigner(costs=[{'first': cost}])
    model.coder = Thing(me=None)
    model.coder.me = model.coder
    model.rest = [1, 'two', torch.ones(1), nn.Identity(), Thing]
    model.register_forward_hook(lambda *args: hook)
    found = {id(thing): below for thing, below in plain_objects(model)}
    assert found == {id(model.assigner): False, id(cost): True,
                     id(model.coder): False}
    assert not reaches_a_network(model.assigner)
    cost.call = nn.Identity().forward
    assert reaches_a_network(model.assigner)


def test_the_losses_of_mmdets_heads():
    from mmdet.models import losses, roi_heads
    from mmdet.models.dense_heads import ATSSHead
    from mmdet.models.losses.ddq_detr_aux_loss import DDQAuxLoss
    from mmdet.utils import register_all_modules
    register_all_modules()
    heads = roi_heads.bbox_heads, roi_heads.mask_heads
    bbox = [heads[0].BBoxHead(), heads[0].Shared2FCBBoxHead(),
            heads[0].SABLHead(num_classes=4, cls_in_channels=4,
                              reg_in_channels=4)]
    masks = [heads[1].GridHead(), heads[1].FusedSemanticHead(
        num_ins=1, fusion_level=0), heads[1].GlobalContextHead(),
        DDQAuxLoss(train_cfg=dict(assigner=dict(
            type='TopkHungarianAssigner', topk=8), alpha=1, beta=6))]
    assert [type(head).__name__ for head in (*bbox, *masks)
            if not takes_predictions(head)] == []
    dense = ATSSHead(num_classes=1, in_channels=1)
    assert not takes_predictions(dense)
    assert not runs_layers(dense, 'get_targets')
    assert not takes_predictions(losses.L1Loss())


def test_layers_whose_parameters_are_elsewhere():
    """As those of shards are."""
    head = Head()
    head.layer._parameters.clear()
    assert runs_layers(head, 'get_targets')
    assert not runs_layers(head, 'loss')
