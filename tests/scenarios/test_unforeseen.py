"""What nobody has foreseen costs the explanation, and never the run."""
from __future__ import annotations

import math

import pytest
import torch
from helpers.torch_features import needs_half
from helpers.toy import ToyDetector, toy_batch
from helpers.training import same, train, weights, wrap
from mmengine.logging import MessageHub

from mmdet_nanfix.diagnosis import conclude, diagnose
from mmdet_nanfix.diagnosis import investigate as investigate_module
from mmdet_nanfix.diagnosis.cause.symptoms import Symptoms
from mmdet_nanfix.diagnosis.conclude import Conclusion
from mmdet_nanfix.diagnosis.context import RunContext
from mmdet_nanfix.diagnosis.counterfactuals import Counterfactuals
from mmdet_nanfix.diagnosis.parts import ModelParts
from mmdet_nanfix.diagnosis.replay.replayer import Replayer
from mmdet_nanfix.guard import step
from mmdet_nanfix.guard.state.buffers import WatchedBuffers
from mmdet_nanfix.hosts.mmengine.reporter import IncidentReporter
from mmdet_nanfix.hosts.mmengine.trainer import MMEngineTrainer
from mmdet_nanfix.incidents import IncidentText

pytestmark = needs_half

PLACES = [
    (diagnose, 'worst_of'), (diagnose, 'find_where'),
    (diagnose, 'config_place'), (WatchedBuffers, 'bad'),
    (WatchedBuffers, 'suspect'), (ModelParts, 'refresh'),
    (ModelParts, 'state'), (ModelParts, 'bad_weights'),
    (ModelParts, 'note_sites'), (RunContext, 'of'), (Replayer, 'run'),
    (investigate_module, 'find_origins'), (investigate_module, 'BatchView'),
    (Counterfactuals, 'scales'), (Conclusion, 'draw'),
    (conclude, 'refine_where'), (conclude, 'verdict'), (conclude, 'advise'),
    (conclude, 'select_remedy'), (Symptoms, 'read'),
    (MMEngineTrainer, 'retry'), (IncidentReporter, 'report'),
    (IncidentText, 'line'), (step, 'Incident'),
]


@pytest.mark.parametrize('fault', [
    dict(rpn=math.nan), dict(box=1e37), dict(x=math.nan)])
@pytest.mark.parametrize('place, name', PLACES)
def test_an_error_of_ours_ends_no_training(toy, monkeypatch, place, name,
                                           fault):
    def strange(*args, **kwargs):
        raise KeyError('unforeseen')

    wrapper = wrap(toy)
    train(toy, wrapper, toy_batch())
    before, state = weights(toy), toy.backbone[1].running_var.clone()
    monkeypatch.setattr(place, name, strange)
    train(toy, wrapper, toy_batch(**fault))
    assert wrapper.skipped and same(before, weights(toy))
    assert torch.equal(toy.backbone[1].running_var, state)
    monkeypatch.undo()
    train(toy, wrapper, toy_batch())
    assert not wrapper.skipped and not same(before, weights(toy))
    assert wrapper.stop_rule.total == 1 and wrapper.stop_rule.steps == 3


class Peculiar(ToyDetector):
    """What is asked of its modules raises."""

    class Odd(torch.nn.Module):

        @property
        def num_classes(self):
            raise RuntimeError('not built yet')

    def __init__(self):
        super().__init__()
        self.odd = Peculiar.Odd()


class Groups(torch.optim.SGD):
    """Keeps what nobody expects in its groups and its state."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group['lr'], group['eps'] = torch.tensor(lr), 'tiny'
        self.state['of the whole'] = 3


@pytest.mark.parametrize('fault', [
    dict(rpn=math.nan), dict(box=1e37), dict(x=math.nan)])
@pytest.mark.parametrize('peculiar', ['model', 'optimizer'])
def test_peculiar_models_and_optimizers(peculiar, fault):
    MessageHub._instance_dict.clear()
    torch.manual_seed(0)
    model = Peculiar() if peculiar == 'model' else ToyDetector()
    wrapper = wrap(model)
    if peculiar == 'optimizer':
        wrapper.optimizer = Groups(model.parameters(), .1)
    train(model, wrapper, toy_batch())
    before = weights(model)
    train(model, wrapper, toy_batch(**fault))
    assert wrapper.skipped and same(before, weights(model))
    train(model, wrapper, toy_batch())
    assert not wrapper.skipped and not same(before, weights(model))


def test_a_retry_that_fails_by_a_bug_of_ours_is_in_the_record(
        toy, monkeypatch):
    def strange(*args, **kwargs):
        raise ZeroDivisionError('a bug of ours')

    incidents = []
    wrapper = wrap(toy, nanfix=dict(init_scale=64., max_scale=2.**30))
    train(toy, wrapper, toy_batch(), toy_batch())
    wrapper.scale_rules.scale = 2.**30
    wrapper.set_scale(2.**30)
    wrapper.reporter.report = incidents.append
    monkeypatch.setattr(MMEngineTrainer, 'retry', strange)
    train(toy, wrapper, toy_batch())
    (incident, ) = incidents
    assert incident.action == 'skipped' and incident.remedy is None
    assert incident.cause.evidence[-1].endswith(
        'it raised ZeroDivisionError: a bug of ours')
