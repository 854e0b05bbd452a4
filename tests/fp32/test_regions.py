"""Regions of full precision: mechanism on toys, effect on real detectors."""
from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from families import REFUSED, batch_for, build
from helpers.torch_features import autocast_is_on
from measuring import Calls
from mmdet.models.losses import FocalLoss
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.assigners import HungarianAssigner
from mmdet.models.task_modules.assigners.match_cost import BaseMatchCost
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import build_optim_wrapper
from mmengine.structures import InstanceData
from stock import stock_on_cpu
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mmdet_nanfix.emulation import cuda_autocast
from mmdet_nanfix.fp32 import MODES, regions
from mmdet_nanfix.fp32.score_losses import finite_forward
from mmdet_nanfix.losses import register_losses
from mmdet_nanfix.torch_support.patching import Patches, replaced

HALF, SINGLE = torch.float16, torch.float32
register_losses()


class OwnLoss(nn.Module):
    """A loss that nobody has heard of: its square overflows half."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, pred, target, weight=None):
        self.seen.append((pred.dtype, autocast_is_on()))
        return ((pred - target) * (pred - target)).mean()


class OwnCost(BaseMatchCost):
    """A matching cost likewise."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __call__(self, pred_instances, gt_instances, img_meta=None):
        pred, true = pred_instances.bboxes, gt_instances.bboxes
        self.seen.append((pred.dtype, autocast_is_on()))
        return (pred[:, None] - true[None]).abs().sum(-1)


class OwnHead(nn.Module):
    """A head likewise, with an assigner."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.measure = OwnLoss()
        self.loss_own = OwnLoss()
        self.assigner = HungarianAssigner([dict(type=OwnCost)])
        self.seen = []

    def forward(self, x):
        return self.layer(x)

    def loss(self, x, batch_data_samples):
        out = self(x)
        return self.loss_by_feat(out, batch_data_samples)

    def loss_by_feat(self, out, samples):
        self.seen.append((out.dtype, autocast_is_on()))
        true = InstanceData(bboxes=samples, labels=torch.zeros(
            len(samples), dtype=torch.long))
        self.assigner.assign(InstanceData(bboxes=out), true)
        return {'loss_a': (out * out).mean(),
                'loss_b': self.measure(out, samples),
                'loss_c': self.loss_own(out, samples)}


class Detector(nn.Module):

    def __init__(self):
        super().__init__()
        self.bbox_head = OwnHead()
        nn.init.constant_(self.bbox_head.layer.weight, 100.)

    def forward(self, x):
        return self.bbox_head.loss(x, x.detach().half())


X = torch.ones(3, 4)
FP32_REGION, HALF_REGION = (SINGLE, False), (HALF, True)


@pytest.mark.parametrize('mode', MODES)
def test_a_head_a_cost_and_a_loss_of_ones_own(mode):
    model = Detector()
    head = model.bbox_head
    regions.install(model)
    with cuda_autocast(), regions.switched(mode, 'cpu'):
        losses = model(X)
    wanted = FP32_REGION if mode == 'heads' else HALF_REGION
    assert head.seen == head.assigner.match_costs[0].seen == [wanted]
    assert losses['loss_a'].isfinite() == (mode == 'heads')
    # What a parent calls a loss, or a class that is called one.
    for loss, key in ((head.loss_own, 'loss_c'), (head.measure, 'loss_b')):
        assert loss.seen == [
            HALF_REGION if mode is None else FP32_REGION]
        assert losses[key].isfinite() == (mode is not None)


def test_nothing_counts_outside_of_the_switch():
    model = Detector()
    regions.install(model)
    with cuda_autocast():
        assert model(X)['loss_c'].isinf()
        with regions.switched('heads', 'cpu'):
            assert model(X)['loss_c'].isfinite()
        assert model(X)['loss_c'].isinf()


def test_the_switch_goes_back_after_an_exception():
    with pytest.raises(KeyError), regions.switched('heads', 'cpu'):
        raise KeyError
    model = Detector()
    regions.install(model)
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        model.bbox_head.assigner.match_costs.clear()
        with pytest.raises(Exception):  # noqa: B017
            model(X)
        assert autocast_is_on()
        del model.bbox_head.assigner
        model.bbox_head.assigner = HungarianAssigner([dict(type=OwnCost)])
        assert model(X)['loss_a'].isfinite()


def test_nothing_is_left_on_modules_and_copies():
    model = Detector()
    before = {name: set(vars(module)) for name, module
              in model.named_modules()}
    regions.install(model)
    regions.install(model)
    assert before == {name: set(vars(module)) for name, module
                      in model.named_modules()}
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
              ExponentialMovingAverage(model).module]
    for twin in copies:
        assert twin.state_dict().keys() == model.state_dict().keys()
        with cuda_autocast(), regions.switched('heads', 'cpu'):
            assert twin(X)['loss_a'].isfinite()
        assert twin.bbox_head.seen == [FP32_REGION]


def test_nothing_is_cast_twice():
    model = Detector()
    regions.install(model)
    model.bbox_head.assigner.assign = lambda *args: None
    casts = {}
    for mode in (None, 'heads'):
        with cuda_autocast(), regions.switched(mode, 'cpu'), (
                Calls()) as calls:
            model(X)
        casts[mode] = calls.by_name['_to_copy']
    # The output and the samples, for the head and the losses within it.
    assert casts['heads'] == casts[None] + 2


def test_what_is_fp32_stays_the_object_that_it_is():
    seen = []

    class Head(nn.Module):

        def loss_by_feat(self, *args):
            seen.extend(args)

    model = nn.Sequential(Head())
    regions.install(model)
    sample, meta = InstanceData(bboxes=X), [dict(img_shape=(1, 1))]
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        model[0].loss_by_feat(X, sample, meta)
    assert seen[0] is X and seen[1] is sample and seen[2] is meta


def test_methods_that_run_layers_stay_half():

    class Pure(nn.Module):

        def loss(self, pred, target):
            return (pred - target).dtype

    class Itself(nn.Module):

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

        def loss(self, x, target):
            return self(x).dtype

    class Layer(Itself):

        def loss(self, x, target):
            return self.layer(x).dtype

    class Forward(Itself):

        def loss(self, x, target):
            return self.forward(x).dtype

    class HandsOn(Itself):

        def loss(self, x, target):
            return functional.linear(x, run(self).weight).dtype

    def run(module):
        return module.layer

    class Nested(Itself):

        def loss(self, xs, target):
            return [self(x) for x in (xs, )][0].dtype

    class Helper(Itself):

        def loss(self, x, target):
            return self.run(x).dtype

        def run(self, x):
            return self.layer(x)

    class Samples(Itself):

        def loss(self, x, batch_data_samples):
            return functional.linear(x, self.layer.weight).dtype

    kinds = (Pure, Itself, Layer, Forward, HandsOn, Nested, Helper,
             Samples)
    model = nn.ModuleList([kind() for kind in kinds])
    regions.install(model)
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        found = {type(head): head.loss(X.half(), X.half())
                 for head in model}
    assert found == {kind: SINGLE if kind is Pure else HALF
                     for kind in kinds}


def test_a_model_is_no_head_and_a_network_no_loss():

    class Net(nn.Module):

        def __init__(self, nested=True):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            if nested:
                self.loss_perceptual = Net(nested=False)

        def forward(self, x):
            return self.layer(x)

        def loss(self, x, target):
            return functional.linear(x, target)

    model = Net()
    regions.install(model)
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        assert model.loss(X, X).dtype == HALF
        assert model(X).dtype == model.loss_perceptual(X).dtype == HALF


def test_layers_of_other_roles_are_left():
    """A network of a loss has ReLUs, and so has every other."""

    class Perceptual(nn.Sequential):

        def __init__(self):
            super().__init__(nn.Linear(4, 4), nn.ReLU())

    class ModelWithLoss(nn.Module):

        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x):
            return self.net(x)

    model = nn.Module()
    model.loss_perceptual = Perceptual()
    model.loss_pool, model.loss_same = nn.AvgPool1d(2), nn.Identity()
    model.losses = nn.ModuleList()
    model.loss_mse = nn.MSELoss()
    model.inner = ModelWithLoss()
    before = {kind: kind.forward for kind in (
        nn.Module, nn.ReLU, nn.AvgPool1d, nn.Identity, nn.MSELoss,
        ModelWithLoss, nn.Sequential)}
    regions.install(model)
    assert before == {kind: kind.forward for kind in before}
    assert torch.jit.script(nn.MSELoss())(X, X) == 0


def test_containers_of_losses():

    class Head(nn.Module):

        def __init__(self):
            super().__init__()
            self.losses = nn.ModuleDict({'a': Squares()})
            self.loss_pair = nn.ModuleList([Squares(), OwnLoss()])

    class Squares(nn.Module):

        def forward(self, pred, target):
            return ((pred - target) * (pred - target)).mean()

    model = Head()
    regions.install(model)
    pred = torch.full((2, 4), 300.).half()
    with cuda_autocast(), regions.switched('losses', 'cpu'):
        for loss in (*model.losses.values(), *model.loss_pair):
            assert loss(pred, pred * 0).item() == 90000.


def test_objects_stay_themselves():
    """What an assigner remembers, half tensors too, is not of a copy."""

    class Assigner:

        def __init__(self):
            self.calls, self.last = 0, torch.ones(1).half()

        def assign(self, pred, context=None):
            self.calls += 1
            self.last = self.last + 1
            return self, pred.dtype

    class Head(nn.Module):

        def __init__(self):
            super().__init__()
            self.assigner = Assigner()

    model = Head()
    regions.install(model)
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        same, dtype = model.assigner.assign(X.half(), context=model)
        model.assigner.assign(X.half())
    assert same is model.assigner and dtype == SINGLE
    assert same.calls == 2 and same.last == 3


class Encoder:

    def __init__(self, **held):
        vars(self).update(held)

    def __call__(self, net, x):
        return net(x).dtype

    def encode(self, net, x):
        return net(x).dtype


@pytest.mark.parametrize('hold', [
    lambda net: dict(net=net), lambda net: dict(nets=[net]),
    lambda net: dict(call=net.forward),
    lambda net: dict(other=Encoder(net=net))])
def test_objects_that_hold_a_network_run_in_half(hold):

    class Own(Encoder):
        encode, __call__ = (
            lambda self, net, x: net(x).dtype for _ in range(2))

    class Model(nn.Module):

        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)
            self.encoder = Own(**hold(self.net))

    model = Model()
    regions.install(model)
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        assert model.encoder(model.net, X) == HALF
        assert model.encoder.encode(model.net, X) == HALF


def test_what_is_called_and_below_no_assigner_is_left():

    class Called:

        def __call__(self, module, inputs, output):
            output.mul_(0.)

    class Other:

        def __call__(self, net, x):
            return net(x).dtype

    model = nn.Linear(4, 4)
    model.register_forward_hook(Called())
    model.called = Other()
    regions.install(model)
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        assert model(X).abs().max() == 0
        assert model.called(model, X) == HALF


def test_overriding_with_the_marks_of_another():
    import functools

    class Base(nn.Module):

        def loss_by_feat(self, out):
            return out.dtype

    class Override(Base):

        @functools.wraps(Base.loss_by_feat)
        def loss_by_feat(self, out):
            return out.dtype

    regions.install(nn.Sequential(Base()))
    Override.loss_by_feat.__dict__.update(vars(Base.loss_by_feat))
    model = nn.Sequential(Override())
    regions.install(model)
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        assert model[0].loss_by_feat(X.half()) == SINGLE


def test_classes_that_are_not_to_be_looked_at():

    class Raises:

        def __get__(self, instance, owner):
            raise AttributeError('not of the class')

    class Nowhere:

        def encode(self, x):
            return x.dtype

    class Head(nn.Module):
        loss_scale, forward_pass = Raises(), Raises()

        def __init__(self):
            super().__init__()
            self.coder = Nowhere()

        def loss_by_feat(self, out):
            return out.dtype

    Nowhere.__module__ = None
    regions.install(nn.Sequential(Head()))


def test_threads_do_not_share_a_region():
    import threading
    begun, ended = threading.Event(), threading.Event()
    seen = []

    class Head(nn.Module):

        def loss_by_feat(self, x, waits):
            if waits:
                begun.set()
                ended.wait(10)
            seen.append(x.dtype)

    head = Head()
    regions.install(nn.Sequential(head))
    other = threading.Thread(target=head.loss_by_feat,
                             args=(X.half(), True))
    with regions.switched('heads', 'cpu'):
        other.start()
        begun.wait(10)
        head.loss_by_feat(X.half(), False)
        ended.set()
        other.join()
    assert seen == [SINGLE, SINGLE]


def test_compiled_heads():
    """Regions run as they are, what is around them is compiled."""

    class Head(nn.Module):

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            nn.init.constant_(self.layer.weight, 100.)

        def forward(self, x):
            return self.layer(x).sigmoid()

        def loss(self, x, batch_data_samples):
            return self.loss_by_feat(self.layer(x))

        def loss_by_feat(self, out):
            return (out * out).mean()

    class Model(nn.Module):

        def __init__(self):
            super().__init__()
            self.bbox_head = Head()

        def forward(self, x):
            return self.bbox_head.loss(x, None), self.bbox_head(x).dtype

    model = Model()
    regions.install(model)
    compiled = torch.compile(model, backend='eager')
    for mode in (None, 'heads', None, 'heads'):
        with cuda_autocast(), regions.switched(mode, 'cpu'):
            loss, dtype = compiled(X)
        assert loss.isfinite() == (mode == 'heads')
        assert dtype == (SINGLE if mode == 'heads' else HALF)


def test_samplers_get_fp32_and_heads_in_them_run_in_half():
    seen = []

    class Sampler:

        def __init__(self, head):
            self.context = head

        def sample(self, boxes, feats):
            seen.append((boxes.dtype, self.context.layer(feats).dtype))

    class RoIHead(nn.Module):

        def __init__(self):
            super().__init__()
            self.bbox_head = OwnHead()
            self.sampler = Sampler(self.bbox_head)

    model = RoIHead()
    regions.install(model)
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        model.sampler.sample(X.half(), X.half())
    assert seen == [(SINGLE, HALF)]


def test_sigmoid_of_heads():

    class Head(nn.Module):

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            nn.init.constant_(self.layer.weight, 12.)

        def forward(self, x):
            return self.layer(x).sigmoid()

        def loss_by_feat(self, score):
            return -(1 - score).log().mean()

    model = nn.Sequential(Head())
    regions.install(model)
    x = torch.ones(1, 1)
    with cuda_autocast():
        assert model[0](x) == 1
        with regions.switched('heads', 'cpu'):
            score = model[0](x)
            assert score.dtype == SINGLE and score < 1
            loss = model[0].loss_by_feat(score)
    assert loss.item() == pytest.approx(12, rel=.01)
    loss.backward()
    assert model[0].layer.weight.grad.item() == pytest.approx(1, rel=.01)


def extractor():
    return SingleRoIExtractor(
        roi_layer=dict(type='RoIAlign', output_size=2, sampling_ratio=0),
        out_channels=3, featmap_strides=[4, 8, 16, 32])


def levels(module, monkeypatch):
    """Records the levels that RoIs are mapped to."""
    found = []
    original = type(module).map_roi_levels

    def look(self, rois, count):
        found.append(original(self, rois, count).tolist())
        return original(self, rois, count)

    monkeypatch.setattr(type(module), 'map_roi_levels', look)
    return found


def test_large_rois_go_to_their_level(monkeypatch):
    """In half 300 * 300 is inf, and inf is the last level."""
    module = extractor()
    found = levels(module, monkeypatch)
    model = nn.Sequential(module)
    regions.install(model)
    feats = tuple(torch.randn(1, 3, 512 // s, 512 // s).half()
                  .requires_grad_() for s in (4, 8, 16, 32))
    rois = torch.tensor([[0., 10., 10., 310., 310.],
                         [0., 5., 5., 60., 70.]])
    with cuda_autocast():
        module(feats, rois)
        with regions.switched('heads', 'cpu'):
            out = module(feats, rois)
    assert found == [[3, 0], [2, 0]]
    assert out.dtype == HALF
    out.float().sum().backward()
    assert feats[2].grad.dtype == HALF and feats[2].grad.abs().sum() > 0
    wanted = module(tuple(feat.float() for feat in feats), rois)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-3, atol=1e-3)


def test_extractors_with_layers_of_their_own_keep_them_half():
    seen = []

    class Extractor(SingleRoIExtractor):

        def forward(self, feats, rois):
            pooled = self.roi_layers[0](feats[0], rois)
            seen.append(pooled.dtype)
            return self.post(pooled)

    module = Extractor(
        roi_layer=dict(type='RoIAlign', output_size=2, sampling_ratio=2),
        out_channels=3, featmap_strides=[4])
    module.post = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(module)
    regions.install(model)
    feats = (torch.ones(1, 3, 8, 8).half(), )
    rois = torch.tensor([[0., 1., 1., 20., 20.]])
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        assert model[0](feats, rois).dtype == HALF
    # The layer widens, and rounds again.
    assert seen == [HALF]


@pytest.mark.parametrize('reentrant', [False, True])
def test_regions_in_checkpointed_forwards(reentrant):
    """What runs again in the backward finds the switch as it was."""
    module = extractor()
    regions.install(nn.Sequential(module))
    feats = tuple(torch.randn(1, 3, 64 // s, 64 // s).half()
                  .requires_grad_() for s in (4, 8, 16, 32))
    rois = torch.tensor([[0., 10., 10., 40., 40.]])
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        out = checkpoint(lambda *feats: module(feats, rois), *feats,
                         use_reentrant=reentrant)
    with regions.switched('heads', 'cpu'):
        out.float().sum().backward()
    assert feats[0].grad.abs().sum() > 0


@pytest.mark.parametrize('reentrant', [None, False, True])
def test_sigmoid_in_checkpointed_parts(reentrant):

    class Gate(nn.Module):

        def forward(self, x):
            return x * x.sigmoid()

    class Head(nn.Module):

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            self.gate = Gate()
            nn.init.constant_(self.layer.weight, 12.)

        def block(self, x):
            return self.layer(x).sigmoid()

        def forward(self, x):
            run = (lambda part, x: part(x)) if reentrant is None else (
                lambda part, x: checkpoint(part, x,
                                           use_reentrant=reentrant))
            other = run(self.gate, x)
            return run(self.block, x), torch.sigmoid(other)

        def loss_by_feat(self, score):
            return -(1 - score).log().mean()

    head = Head()
    regions.install(nn.Sequential(head))
    x = torch.ones(1, 1, requires_grad=True)
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        loss = head.loss_by_feat(head(x)[0])
    with regions.switched('heads', 'cpu'):
        loss.backward()
    assert loss.item() == pytest.approx(12, rel=.01)
    assert head.layer.weight.grad.item() == pytest.approx(1, rel=.01)


def test_extractors_keep_how_they_are_called():
    module = extractor()
    regions.install(nn.Sequential(module))
    feats = torch.randn(1, 3, 16, 16)
    rois = torch.tensor([[0., 10., 10., 40., 40.]])
    layer = module.roi_layers[0]
    assert torch.equal(layer(input=feats, rois=rois), layer(feats, rois))
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        out = layer(rois=rois, input=feats.half())
    assert out.dtype == HALF

    class Named(nn.Module):

        def __init__(self):
            super().__init__()
            self.roi_layers = nn.ModuleList()

        def forward(self, feats, rois):
            return feats['a'] * 2, rois

    named = Named()
    regions.install(nn.Sequential(named))
    with cuda_autocast(), regions.switched('heads', 'cpu'):
        out, same = named({'a': feats.half()}, rois.long())
    assert out.dtype == HALF and same.dtype == torch.long
    assert named({'a': feats}, rois)[0].dtype == SINGLE


def test_inverse_sigmoid_at_the_ends():
    """1 / 1e-5 does not fit half; the quotient's gradient is NaN."""
    from mmdet.models.layers.transformer import utils
    head = build('deformable_detr').bbox_head
    regions.install(nn.Sequential(head))
    import mmdet.models.dense_heads.deformable_detr_head as place
    x = torch.tensor([0., 1., .5]).half().requires_grad_()
    with cuda_autocast():
        assert not place.inverse_sigmoid(x).isfinite().all()
        with regions.switched('heads', 'cpu'):
            out = place.inverse_sigmoid(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert place.inverse_sigmoid.__wrapped__ in (
        utils.inverse_sigmoid, getattr(utils.inverse_sigmoid,
                                       '__wrapped__', None))


def trained(model, batch, steps=2, kind='NanSafeAmpOptimWrapper',
            **settings):
    """Losses and weights after some steps."""
    model = copy.deepcopy(model)
    wrapper = build_optim_wrapper(model, dict(
        type=kind, optimizer=dict(type='SGD', lr=1e-4),
        loss_scale=dict(init_scale=64.), **settings))
    logged = []
    for step in range(steps):
        torch.manual_seed(step)
        logged.append({key: value.detach() for key, value
                       in model.train_step(copy.deepcopy(batch),
                                           wrapper).items()
                       if 'loss' in key})
    return logged, model.state_dict()


# The assignment of these looks at predictions: a rounding moves it.
MATCHED = {'faster_rcnn', 'dynamic_rcnn', 'cascade_rcnn', 'mask_rcnn',
           'detr', 'deformable_detr', 'yolox', 'rtmdet'}
TEN = ['faster_rcnn', 'mask_rcnn', 'retinanet', 'atss', 'gfl', 'fcos',
       'centernet', 'yolox', 'yolov3', 'rtmdet', 'detr', 'deformable_detr']


@pytest.mark.parametrize('name', TEN)
def test_healthy_losses_of_families(name):
    """Off, they are stock's bit for bit; on, within half precision."""
    model = build(name)
    batch = batch_for(model)
    with stock_on_cpu():
        stock, weights = trained(model, batch, kind='AmpOptimWrapper')
    off, off_weights = trained(model, batch, nanfix=dict(fp32=None))
    for left, right in zip([*stock, weights], [*off, off_weights]):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    on, _ = trained(model, batch, steps=1)
    limit = 5e-2 if name in MATCHED else 2e-3
    for key, value in stock[0].items():
        assert (on[0][key] - value).abs() <= limit * value.abs() + 1e-3, key


@pytest.mark.parametrize('name', sorted(REFUSED))
def test_detectors_that_stock_cannot_train(name):
    """BCE of a half score, fp32 into half, RoIAlign of mixed dtypes."""
    model = build(name)
    batch = batch_for(model, 64)
    with stock_on_cpu(), pytest.raises(RuntimeError,
                                       match=REFUSED[name][1]):
        trained(model, batch, steps=1, kind='AmpOptimWrapper')
    logged, weights = trained(model, batch, steps=1)
    assert all(value.isfinite() for value in logged[-1].values())
    assert any(not torch.equal(value, weights[key])
               for key, value in model.state_dict().items())


def test_proposals_are_those_of_fp32_predictions(monkeypatch):
    """Decoded, scored and suppressed in fp32 from what the layers gave."""
    model = build('faster_rcnn')
    batch = batch_for(model)
    seen, loss = {}, type(model.roi_head).loss

    def look(self, x, proposals, samples):
        seen[mode] = [item.clone() for item in proposals]
        return loss(self, x, proposals, samples)

    monkeypatch.setattr(type(model.roi_head), 'loss', look)
    for mode in (None, 'heads'):
        trained(model, batch, steps=1, nanfix=dict(fp32=mode))
    for mode, rounded in ((None, True), ('heads', False)):
        for item in seen[mode]:
            assert item.scores.dtype == item.bboxes.dtype == SINGLE
            half = item.scores.half().float()
            assert torch.equal(half, item.scores) == rounded


def test_two_stages_train_in_bfloat16():
    """mmcv's RoIAlign and focal loss have no such kernel."""
    model = build('faster_rcnn')
    batch = batch_for(model)
    with pytest.raises(RuntimeError, match='bfloat16|BFloat16'):
        trained(model, batch, dtype='bfloat16', nanfix=dict(fp32=None))
    logged, _ = trained(model, batch, dtype='bfloat16')
    assert all(value.isfinite() for value in logged[-1].values())


@pytest.mark.parametrize('within', [True, False])
def test_regions_stand_over_the_emulation_whenever_they_are_made(within):
    """What CUDA computes is below them, and gone with the emulation."""

    class Loss(FocalLoss):
        forward = inspect.unwrap(FocalLoss.forward)

    loss = Loss(reduction='none')
    model = nn.ModuleDict({'loss_cls': loss})
    pred, target = torch.full((1, 2), 20.).half(), torch.tensor([0])
    raw, seen = vars(Loss)['forward'], []

    def cudas(original):
        return lambda self, *args: seen.append(True) or original(self, *args)

    for make in ((cudas, ) if within else ()):
        with Patches('emulation', innermost=True) as patches:
            patches.wrap(Loss, 'forward', make)
            regions.install(model)
    regions.install(model)
    assert [what.owner for what in replaced() if what.place is Loss] == [
        'fp32 regions']
    with Patches('emulation', innermost=True) as patches:
        patches.wrap(Loss, 'forward', cudas)
        for mode in MODES:
            with regions.switched(mode, 'cpu'):
                assert loss(pred, target).dtype == (
                    HALF if mode is None else SINGLE)
    assert len(seen) == 3 and loss(pred, target).dtype == HALF
    assert len(seen) == 3 and inspect.unwrap(Loss.forward) is raw


def test_a_mended_loss_under_emulation_is_not_cudas():
    loss = FocalLoss(reduction='none')
    regions.install(nn.ModuleDict({'loss_cls': loss}), finite_forward)
    pred, target = torch.full((1, 2), 20.).half(), torch.tensor([0])
    for _ in range(2):
        with cuda_autocast():
            assert str(loss(pred, target)[0].tolist()) == '[nan, inf]'
            with regions.switched('losses', 'cpu'):
                assert loss(pred, target).isfinite().all()
        assert loss(pred, target).dtype == HALF
