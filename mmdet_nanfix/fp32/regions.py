"""Choose the methods of a model that run in full precision.

MMDetection 2.x ran the loss, target and decoding methods of every head
outside of autocast (``force_fp32``); 3.x dropped that. :func:`install` finds
what a model computes there, and wraps it in the *classes*, for as long as
there is a :class:`.PrecisionControl`: nothing is left on a model's own
modules, copies and checkpoints know nothing of it. A wrapped method is the
original until :func:`switched` says otherwise, which a guarded step does for
its forward and backward.

Nothing is known of a model but what its methods are called:

=================  ========================================================
of a head          ``loss_by_feat``, ``loss_and_target``,
                   ``predict_by_feat``, ``refine_bboxes``,
                   ``regress_by_class``, ``map_roi_levels``; ``loss`` and
                   ``get_targets`` where they run no layers; ``sigmoid`` in
                   its own code, and in that of a decoder that inverts it
of plain objects   ``assign``, ``encode``, ``decode``, and what is called
                   below an assigner: matching costs, IoU calculators; if no
                   module hangs below them. ``sample`` gets fp32 inputs, and
                   keeps autocast
RoI extractors     ``forward``; the result is rounded to half again
losses             ``forward``: modules called ``...Loss``, and those that a
                   parent calls ``loss...`` or ``criterion``; not torch's
                   own, which autocast runs in fp32
functions          ``inverse_sigmoid``, ``sigmoid_geometric_mean``
=================  ========================================================

An argument that holds half tensors is a copy within a region: what the
region writes into it, the caller does not see.
"""
from __future__ import annotations

import functools
import sys

from torch import nn

from .introspect import (
    loss_modules,
    names_in,
    plain_objects,
    reaches_a_network,
    runs_layers,
    takes_predictions,
)
from .wrapping import (
    Mend,
    exact,
    fp32_inputs,
    fp32_loss,
    in_region,
    rounded,
    switched,
    wide_sigmoid,
    wrap,
    wrap_function,
)

__all__ = ['install', 'switched']

_HEAD_METHODS = ('loss_by_feat', 'loss_and_target', 'predict_by_feat',
                 'refine_bboxes', 'regress_by_class', 'map_roi_levels')
_OBJECT_METHODS = ('assign', 'encode', 'decode')
_FUNCTIONS = ('inverse_sigmoid', 'sigmoid_geometric_mean')


def install(model: nn.Module, mend_loss: Mend = lambda forward: None,
            mend_cost: Mend = lambda method: None) -> None:
    """Wrap what a model computes its losses and targets with.

    Costs a walk through the model; what is wrapped already is left as it is.

    Args:
        model: The model.
        mend_loss: For the forward of a loss.
        mend_cost: For a method of a plain object.
    """
    for module in model.modules():
        _wrap_head(module, may_lose=type(module) is not type(model))
        layers = getattr(module, 'roi_layers', None)
        if isinstance(layers, nn.ModuleList):
            for part in (module, *layers):
                wrap(type(part), 'forward', rounded)
    for module in loss_modules(model):
        wrap(type(module), 'forward', functools.partial(
            fp32_loss, mend=mend_loss))
    for thing, is_called in plain_objects(model):
        kind = type(thing)
        wrap(kind, 'sample', fp32_inputs)
        if reaches_a_network(thing):
            continue
        for name in (*_OBJECT_METHODS, *['__call__'] * is_called):
            wrap(kind, name, in_region)
        for name in dir(kind):
            wrap(kind, name, functools.partial(exact, mend=mend_cost))
    for base in {base for module in model.modules()
                 for base in type(module).__mro__}:
        for name in _FUNCTIONS:
            wrap_function(sys.modules.get(base.__module__), name)


def _wrap_head(module: nn.Module, may_lose: bool) -> None:
    """Wrap the methods of a module, where it is a head."""
    kind = type(module)
    for name in _HEAD_METHODS:
        wrap(kind, name, in_region)
    has_a_loss = may_lose and takes_predictions(module)
    if has_a_loss:
        wrap(kind, 'loss', in_region)
    if not runs_layers(module, 'get_targets'):
        wrap(kind, 'get_targets', in_region)
    methods = {name: names_in(kind, name) for name in dir(kind)
               if not name.startswith('__')}
    if has_a_loss or {'loss_by_feat', 'loss_and_target'} & set(
            methods) or any('inverse_sigmoid' in names
                            for names in methods.values()):
        for name, names in methods.items():
            if {'sigmoid', 'expit'} & names:
                wrap(kind, name, wide_sigmoid)
