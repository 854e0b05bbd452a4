"""MMDetection's losses in fp32, under names of their own.

For every registered loss class of ``mmdet.models.losses`` there is an
``Fp32<Name>``: a subclass with the same arguments, attributes and state,
whose forward gets fp32 copies of all floating inputs (prediction, target,
weight, a tensor ``avg_factor``) and runs outside of autocast. They are made
from the host's own classes, so that a loss that a fork adds has one too.
Where the host's formula is not finite or wrong in fp32, they take another:
:mod:`.score_losses`.

A head that looks at its loss's config or class (``use_sigmoid``,
``isinstance``, a written ``beta``) finds what it looks for. One compares the
name of the type: ``GuidedAnchorHead`` takes ``loss_loc`` for a focal loss
where its type is ``'FocalLoss'``, and no other.
"""
from __future__ import annotations

import functools
from typing import Any, Iterator

from mmengine.registry import MODELS
from torch import nn

from ...fp32 import MARK, finite_forward, in_fp32

__all__ = ['fp32_class', 'fp32_losses', 'register_losses']

# Pickled classes name it.
_HOME = 'mmdet_nanfix.losses'
#: Classes that were made, by name.
fp32_losses: dict[str, type[nn.Module]] = {}


def fp32_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a loss that is computed in fp32.

    Args:
        kind: The loss class; its subclass is found again by its name in
            ``mmdet_nanfix.losses``, so that it can be pickled.

    Example:
        >>> Fp32MyLoss = fp32_class(MyLoss)
    """
    own = finite_forward(kind.forward)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return in_fp32(functools.partial(own, self), *args, **kwargs)

    setattr(forward, MARK, forward)
    name = f'Fp32{kind.__name__}'
    made = fp32_losses[name] = type(name, (kind, ), {
        'forward': forward,
        '__doc__': f'``{kind.__name__}``, computed in fp32; finite for '
                   'finite input.',
        '__module__': _HOME,
    })
    return made


def _host_losses() -> Iterator[type[nn.Module]]:
    from mmdet.models import losses
    from mmdet.registry import MODELS as HOST

    for name, kind in vars(losses).items():
        if isinstance(kind, type) and issubclass(kind, nn.Module) and (
                HOST.module_dict.get(name) is kind):
            yield kind


def register_losses() -> dict[str, type[nn.Module]]:
    """Register ``Fp32<Name>`` in MMEngine's root registry, once.

    Returns:
        The classes by name.

    Raises:
        ImportError: mmdet is not installed.
    """
    made = {}
    for kind in _host_losses():
        name = f'Fp32{kind.__name__}'
        known = MODELS.module_dict.get(name)
        if known is None or known.__base__ is not kind:
            known = fp32_class(kind)
            MODELS.register_module(name=name, module=known, force=True)
        made[name] = known
    return made
