"""Regions of full precision in the classes of a model.

MMDetection 2.x ran the loss, target and decoding methods of every head
outside of autocast (``force_fp32``); 3.x dropped that. :func:`install` finds
what a model computes there, and wraps it in the *classes*: nothing is left
on a model's own modules, copies and checkpoints know nothing of it. A wrapped
method is the original until :func:`switched` says otherwise, which a guarded
step does for its forward and backward.

Nothing is known of a model but what its methods are called:

=================  ========================================================
of a head          ``loss_by_feat``, ``loss_and_target``, ``loss`` where it
                   computes one from predictions, ``get_targets``,
                   ``predict_by_feat``, ``refine_bboxes``,
                   ``regress_by_class``; ``sigmoid`` in its forward, and
                   in that of a decoder that inverts it
of plain objects   ``assign``, ``encode``, ``decode`` and what is called:
                   assigners, coders, matching costs, IoU calculators, if
                   they hold no module; ``sample`` gets fp32 inputs, and
                   keeps autocast
RoI extractors     ``forward``; the result is rounded to half again
losses             ``forward``: modules called ``...Loss``, and those that a
                   parent calls ``loss...`` or ``criterion``
=================  ========================================================
"""
import contextlib
import dis
import functools
import inspect
import sys
import types
from typing import Any, Callable, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn

from .precision import WideSigmoid, not_compiled, widened, without_autocast

__all__ = ['MARK', 'MODES', 'install', 'switched']

#: Attribute of what is a region already.
MARK = 'fp32_region_of_mmdet_nanfix'
#: Values of the setting ``fp32``.
MODES = ('heads', 'losses', None)

_HEAD_METHODS = ('loss_by_feat', 'loss_and_target', 'predict_by_feat',
                 'get_targets', 'refine_bboxes', 'regress_by_class',
                 'map_roi_levels')
_OBJECT_METHODS = ('assign', 'encode', 'decode', '__call__')
_SAMPLES = ('batch_data_samples', 'data_samples')
# What no wrapped method can hang below.
_MACHINERY = ('builtins', 'torch', 'numpy', 'logging', 'threading',
              'collections', 'mmengine', 'mmdet_nanfix')
_TOO_LONG = 1000

Method = Callable[..., Any]
#: Gives for a method the one to use in its place in fp32, or None.
Mend = Callable[[Method], Optional[Method]]


class _Switch:
    """What is in force in this process.

    Attributes:
        mode: One of :data:`MODES`.
        device: Type of the device whose autocast is meant.
        inside: Whether a region has begun: nothing is cast twice.
    """

    mode: Optional[str] = None
    device = 'cpu'
    inside = False


_SWITCH = _Switch()


@contextlib.contextmanager
def switched(mode: Optional[str], device: str) -> Iterator[None]:
    """Let the regions count.

    A global, not a context variable: checkpointed forwards run again in
    threads of autograd, and must find what they found before.

    Args:
        mode: ``'heads'`` for all, ``'losses'`` for the loss modules alone,
            None for none.
        device: Type of the device whose autocast is left.
    """
    before = _SWITCH.mode, _SWITCH.device
    _SWITCH.mode, _SWITCH.device = mode, device
    try:
        yield
    finally:
        _SWITCH.mode, _SWITCH.device = before


@not_compiled
def _enter(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call in a region: fp32 inputs, autocast off, nothing cast again."""
    _SWITCH.inside = True
    try:
        with without_autocast(_SWITCH.device):
            return function(*widened(args), **widened(kwargs))
    finally:
        _SWITCH.inside = False


def _in_fp32(original: Method) -> Method:
    """All floating inputs in fp32, autocast off, the result as it is."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _SWITCH.mode != 'heads' or _SWITCH.inside:
            return original(self, *args, **kwargs)
        return _enter(functools.partial(original, self), args, kwargs)

    return call


def _loss(original: Method, mend: Mend) -> Method:
    """The same for a loss, in either mode, by a formula that is finite."""
    mended = mend(original) or original

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _SWITCH.mode is None:
            return original(self, *args, **kwargs)
        if _SWITCH.inside:
            return mended(self, *args, **kwargs)
        return _enter(functools.partial(mended, self), args, kwargs)

    return forward


def _exact(original: Method, mend: Mend) -> Method:
    """In a region another formula, where there is one."""
    mended = mend(original)
    if mended is None:
        return original
    exact = mended

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (exact if _SWITCH.inside else original)(*args, **kwargs)

    return call


def _from_fp32(original: Method) -> Method:
    """Fp32 inputs; what it is made of may run in half, as it likes."""

    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _SWITCH.mode != 'heads' or _SWITCH.inside:
            return original(self, *args, **kwargs)
        return original(self, *widened(args), **widened(kwargs))

    return sample


def _rounded(original: Method) -> Method:
    """In fp32, the result in half again: what follows is convolved."""

    @functools.wraps(original)
    def forward(self: nn.Module, feats: Any, *args: Any,
                **kwargs: Any) -> Any:
        first = feats if isinstance(feats, Tensor) else feats[0]
        if _SWITCH.mode != 'heads' or _SWITCH.inside or (
                _layers_besides(self)) or first.dtype == torch.float32:
            return original(self, feats, *args, **kwargs)
        out = _enter(functools.partial(original, self), (feats, *args), kwargs)
        return out.to(first.dtype)

    return forward


def _layers_besides(extractor: nn.Module) -> bool:
    """Whether an extractor has convolutions of its own: they stay half."""
    return any(name != 'roi_layers' for name in extractor._modules)


def _wide_sigmoid(original: Method) -> Method:

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if _SWITCH.mode != 'heads' or _SWITCH.inside:
            return original(*args, **kwargs)
        return _enter_wide(original, args, kwargs)

    return forward


@not_compiled
def _enter_wide(function: Method, args: Any, kwargs: Any) -> Any:
    with WideSigmoid():
        return function(*args, **kwargs)


def _wrap(kind: type, name: str, make: Callable[[Method], Method]) -> None:
    """Wrap a method in the class that defines it, once."""
    for base in kind.__mro__:
        if name in base.__dict__:
            break
    else:
        return
    original = base.__dict__[name]
    if isinstance(original, types.FunctionType) and not (
            hasattr(original, MARK)):
        wrapped = make(original)
        if wrapped is not original:
            setattr(wrapped, MARK, True)
            setattr(base, name, wrapped)


def install(model: nn.Module, mend_loss: Mend = lambda forward: None,
            mend_cost: Mend = lambda method: None) -> None:
    """Wrap what a model computes its losses and targets with.

    Costs a walk through the model; what is wrapped already is left as it is.

    Args:
        model: The model.
        mend_loss: For the forward of a loss.
        mend_cost: For a method of a plain object.
    """
    kinds = {type(module) for module in model.modules()}
    for module in model.modules():
        kind = type(module)
        for name in _HEAD_METHODS:
            _wrap(kind, name, _in_fp32)
        takes_predictions = kind is not type(model) and (
            _takes_predictions(module))
        if takes_predictions:
            _wrap(kind, 'loss', _in_fp32)
        methods = {name: _names(getattr(kind, name)) for name in dir(kind)
                   if name.startswith(('forward', 'loss'))}
        if takes_predictions or {'loss_by_feat', 'loss_and_target'} & set(
                methods) or any('inverse_sigmoid' in names
                                for names in methods.values()):
            for name, names in methods.items():
                if any('sigmoid' in called for called in names):
                    _wrap(kind, name, _wide_sigmoid)
        layers = getattr(module, 'roi_layers', None)
        if isinstance(layers, nn.ModuleList):
            for part in (module, *layers):
                _wrap(type(part), 'forward', _rounded)
    for kind in {type(module) for module in _losses(model)}:
        _wrap(kind, 'forward', functools.partial(_loss, mend=mend_loss))
    for thing in _plain_objects(model):
        kind = type(thing)
        _wrap(kind, 'sample', _from_fp32)
        if any(isinstance(held, nn.Module) for held in vars(thing).values()):
            # What it computes may be a network's.
            continue
        for name in _OBJECT_METHODS:
            _wrap(kind, name, _in_fp32)
        for name in dir(kind):
            _wrap(kind, name, functools.partial(_exact, mend=mend_cost))
    for kind in kinds:
        for base in kind.__mro__:
            _wrap_function(sys.modules.get(base.__module__),
                           'inverse_sigmoid')


def _wrap_function(module: Any, name: str) -> None:
    """Wrap a function where a module's code finds it."""
    original = vars(module).get(name) if module is not None else None
    if isinstance(original, types.FunctionType) and not (
            hasattr(original, MARK)):
        function = original

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if _SWITCH.mode != 'heads' or _SWITCH.inside:
                return function(*args, **kwargs)
            return _enter(function, args, kwargs)

        setattr(wrapped, MARK, True)
        setattr(module, name, wrapped)


def _codes(function: Any) -> Any:
    return getattr(inspect.unwrap(function), '__code__', None)


def _names(method: Any) -> Tuple[str, ...]:
    """Names that the code of a method uses."""
    code = _codes(method)
    return code.co_names if code is not None else ()


def _takes_predictions(module: nn.Module) -> bool:
    """Whether ``loss`` is a loss, and not a forward that ends in one.

    A ``loss`` that gets data samples, that has a ``loss_by_feat`` beside it,
    or that calls itself or a part with weights runs layers: they stay half.
    """
    kind = type(module)
    code = _codes(getattr(kind, 'loss', None))
    if code is None or hasattr(kind, 'loss_by_feat') or any(
            name in _SAMPLES for name in code.co_varnames):
        return False
    layers = {name for name, child in module.named_children()
              if next(child.parameters(), None) is not None}
    return not layers & set(code.co_names) and (
        'forward' not in code.co_names) and not _passes_self(code)


def _passes_self(code: Any) -> bool:
    """Whether a method calls its ``self``, or hands it on."""
    own = code.co_varnames[0] if code.co_argcount else None
    if own in code.co_cellvars:
        return True
    steps = list(dis.get_instructions(code))
    for step, follower in zip(steps, steps[1:]):
        if not step.opname.startswith('LOAD_FAST'):
            continue
        # From Python 3.13 on one instruction may load two.
        names = step.argval if isinstance(step.argval, tuple) else (
            step.argval, )
        if own in names[:-1] or names[-1] == own and not (
                follower.opname.endswith(('_ATTR', '_METHOD'))):
            return True
    return False


def _losses(model: nn.Module) -> Iterator[nn.Module]:
    """Loss modules: by their name, or by what a parent calls them.

    What a parent calls so may be a network as well (a perceptual loss):
    with weights it counts by its own name alone.
    """
    for name, module in model.named_modules():
        if module is model or module._modules and isinstance(
                module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        called = name.split('.')
        if type(module).__name__.endswith('Loss') or (
                any(part.startswith(('loss', 'criterion')) for part in called)
                and next(module.parameters(), None) is None):
            yield module


def _plain_objects(model: nn.Module) -> Iterator[Any]:
    """Objects other than modules and containers that modules hold."""
    seen: Set[int] = set()
    waiting: List[Any] = [
        value for module in model.modules()
        for value in list(vars(module).values())]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (
                Tensor, nn.Module, type, types.FunctionType,
                types.ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, tuple, set)):
            if len(value) < _TOO_LONG:
                waiting.extend(dict.values(value) if isinstance(value, dict)
                               else value)
        elif hasattr(value, '__dict__') and (
                type(value).__module__.partition('.')[0] not in _MACHINERY):
            yield value
            waiting.extend(list(vars(value).values()))
