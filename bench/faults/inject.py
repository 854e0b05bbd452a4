"""Faults that enter a training where users' faults do.

Each kind changes data, weights, state or config, and nothing in the place
where the first non-finite number is then to be found.
"""
from __future__ import annotations

from typing import Any, Callable, Dict

import torch
from torch import Tensor, nn

__all__ = ['BEFORE_BUILD', 'BEFORE_UPDATE', 'config_of', 'inject']

Batch = Dict[str, Any]
Fault = Dict[str, Any]

# Kinds that are there from the first step on.
BEFORE_BUILD = ('config', 'settings')
# Kinds that spoil an update, and so the losses of the step after it.
BEFORE_UPDATE = ('optim', 'moments')


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    """What a case changes in the config, by dotted key below ``model``.

    What it only sets the stage with, and the fault where it is of the config.
    """
    fault = case['fault']
    return {**case['config'],
            **(fault['values'] if fault['kind'] == 'config' else {})}


def _change(tensor: Tensor, fault: Fault) -> None:
    """Multiply by ``factor``, or put ``value`` at ``at`` or everywhere."""
    with torch.no_grad():
        if 'factor' in fault:
            tensor.mul_(fault['factor'])
        elif 'at' in fault:
            tensor[tuple(fault['at'])] = fault['value']
        else:
            tensor.fill_(fault['value'])


def _pixels(fault: Fault, model: nn.Module, wrapper: Any,
            batch: Batch) -> None:
    """Pixels of one image; all become floats, as after ``ToFloat32``.

    With ``branch`` those of one branch of a semi-supervised batch.
    """
    images: list[Tensor | None] = batch['inputs']
    if 'branch' in fault:
        images = batch['inputs'][fault['branch']]
    # A branch has None where a sample is of another one.
    images[:] = [None if image is None else image.float()
                 for image in images]
    _change(images[fault['sample']], fault)


def _box(fault: Fault, model: nn.Module, wrapper: Any, batch: Batch) -> None:
    """One box of one image."""
    boxes = batch['data_samples'][fault['sample']].gt_instances.bboxes
    boxes = getattr(boxes, 'tensor', boxes)
    boxes[fault['index']] = boxes.new_tensor(fault['box'])


def _label(fault: Fault, model: nn.Module, wrapper: Any,
           batch: Batch) -> None:
    """One label of one image."""
    instances = batch['data_samples'][fault['sample']].gt_instances
    instances.labels[fault['index']] = fault['label']


def _meta(fault: Fault, model: nn.Module, wrapper: Any,
          batch: Batch) -> None:
    """What the pipeline says of one image."""
    batch['data_samples'][fault['sample']].set_metainfo(fault['values'])


def _weight(fault: Fault, model: nn.Module, wrapper: Any,
            batch: Batch) -> None:
    """Parameters, by name; ``frozen`` takes them out of training."""
    names = fault['name']
    for name in [names] if isinstance(names, str) else names:
        parameter = model.get_parameter(name)
        _change(parameter, fault)
        if fault.get('frozen'):
            parameter.requires_grad_(False)


def _weights(fault: Fault, model: nn.Module, wrapper: Any,
             batch: Batch) -> None:
    """Several parameters, each by a factor of its own."""
    for name, factor in fault['factors'].items():
        _change(model.get_parameter(name), {'factor': factor})


def _buffer(fault: Fault, model: nn.Module, wrapper: Any,
            batch: Batch) -> None:
    """One buffer; ``eval`` has its module use it, as ``norm_eval`` does."""
    _change(model.get_buffer(fault['name']), fault)
    if fault.get('eval'):
        model.get_submodule(fault['name'].rpartition('.')[0]).eval()


def _optim(fault: Fault, model: nn.Module, wrapper: Any,
           batch: Batch) -> None:
    """Options of the optimizer, such as its learning rate."""
    for group in wrapper.optimizer.param_groups:
        group.update(fault['values'])


def _moments(fault: Fault, model: nn.Module, wrapper: Any,
             batch: Batch) -> None:
    """One running moment of one parameter."""
    state = wrapper.optimizer.state[model.get_parameter(fault['name'])]
    _change(state[fault['moment']], fault)


def _scale(fault: Fault, model: nn.Module, wrapper: Any,
           batch: Batch) -> None:
    """The loss scale; a window must begin with this step."""
    scale = min(fault['value'], wrapper.scale_rules.settings.max_scale)
    wrapper.scale_rules.scale = scale
    wrapper.loss_scaler.update(scale)


_KINDS: dict[str, Callable[[Fault, nn.Module, Any, Batch], None]] = {
    'pixels': _pixels,
    'box': _box,
    'label': _label,
    'meta': _meta,
    'weight': _weight,
    'weights': _weights,
    'buffer': _buffer,
    'optim': _optim,
    'moments': _moments,
    'scale': _scale,
}


def inject(fault: Fault, model: nn.Module, wrapper: Any,
           batch: Batch | None = None) -> None:
    """Let a fault in, once; a kind of :data:`BEFORE_BUILD` is in already.

    Args:
        fault: ``kind``, and what its function here reads.
        model: The detector.
        wrapper: Its optimizer wrapper.
        batch: The batch of the step, which is changed in place.

    Raises:
        ValueError: A kind that does not exist.
    """
    kind = fault['kind']
    if kind in BEFORE_BUILD:
        return
    if kind not in _KINDS:
        raise ValueError('Expected the kind of a fault to be one of '
                         f'{(*BEFORE_BUILD, *_KINDS)}, but got {kind!r}')
    _KINDS[kind](fault, model, wrapper, batch or {})
