"""Tell which part of a model owns a loss, a parameter or a gradient.

The parts are read off the module tree (``backbone``, ``neck``, ``rpn_head``,
``roi_head.bbox_head``, ``roi_head.bbox_head.1``), the owner of a loss off its
autograd graph. There is no table of loss names.
"""
from __future__ import annotations

from typing import Any, Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..fp32 import loss_modules
from ..guard.checks import bad_tensors, leaves_of
from ..incidents import HeadState

__all__ = ['ModelParts', 'UNKNOWN']

#: Owner of a loss that has no graph.
UNKNOWN = '?'


def _holds_heads(module: nn.Module) -> bool:
    return any(name.rpartition('.')[2].endswith('_head')
               for name, _ in module.named_modules())


def _part_names(module: nn.Module, prefix: str,
                besides: Container[nn.Module]) -> Iterator[str]:
    """Names of the parts below a module, parents before children."""
    for name, child in module.named_children():
        if child in besides:
            continue
        path = f'{prefix}{name}'
        yield path
        stages = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if name.endswith('_head') and stages:
            yield from (f'{path}.{stage}'
                        for stage, _ in child.named_children())
        elif _holds_heads(child):
            yield from _part_names(child, f'{path}.', besides)


class ModelParts:
    """The parts of a model and their trainable parameters.

    Args:
        model: Any module; no attribute is set on it.

    Attributes:
        parameters: ``(name, parameter)`` of everything trainable.
        bad_at_start: Names of weights that were not finite at first.
        constants: Those of them that hold infinities on purpose: not
            trained, and without a NaN, as masks are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._loss_owners: dict[str, str] = {}
        self._sure: dict[str, str] = {}
        self.refresh()
        self.bad_at_start = set(self.bad_weights())
        self.constants = {
            name for name in self.bad_at_start
            if not self._weights[name].requires_grad
            and not self._weights[name].isnan().any()}

    def refresh(self) -> None:
        """Look again: layers may have been unfrozen or added."""
        self._names = list(_part_names(
            self._model, '', set(loss_modules(self._model))))
        self._weights = dict(self._model.named_parameters())
        self.parameters = [(name, parameter) for name, parameter
                           in self._weights.items()
                           if parameter.requires_grad]
        self._owners = {id(parameter): self.owner_of_name(name)
                        for name, parameter in self._weights.items()}

    def owner_of_name(self, name: str) -> str:
        """The innermost part that holds a parameter or buffer."""
        owners = [part for part in self._names
                  if name.startswith(f'{part}.')]
        return max(owners, key=len) if owners else name.partition('.')[0]

    def owner_of_loss(self, loss: Tensor) -> str:
        """The part whose parameter is nearest in the graph of a loss.

        A head's last layer is the first thing that its losses meet on the
        way back, whatever they are called. Walks the graph in Python; no
        device sync. ``?`` where the loss has no graph.
        """
        return next((self._owners[id(leaf)] for leaf in leaves_of(loss)
                     if id(leaf) in self._owners), UNKNOWN)

    def note_sites(self, modules: Mapping[str, Iterable[str | None]]
                   ) -> None:
        """Remember who owns which loss key, by where it was computed.

        Better than the nearest parameter, which may be another head's (a
        mask loss of weights that a box head has predicted).

        Args:
            modules: By loss key, the module paths of the operations along
                its graph, the nearest first.
        """
        for key, paths in modules.items():
            for path in paths:
                owner = self.owner_of_name(f'{path}.') if path else ''
                # A head of heads weights what they have computed.
                if owner and not (path == owner and any(
                        part.startswith(f'{owner}.')
                        for part in self._names)):
                    self._sure[key] = owner
                    break

    def note_owners(self, losses: Mapping[str, list[Tensor]]) -> None:
        """Remember who owns which loss key, before a graph is let go."""
        for key, terms in losses.items():
            if self._loss_owners.get(key, UNKNOWN) == UNKNOWN:
                self._loss_owners[key] = self._owner_of_terms(terms)

    def _owner_of_terms(self, terms: list[Tensor]) -> str:
        return next((owner for owner in map(self.owner_of_loss, terms)
                     if owner != UNKNOWN), UNKNOWN)

    def state(self, losses: Mapping[str, list[Tensor]],
              bad_grads: list[str]) -> dict[str, HeadState]:
        """Describe every part, the healthy ones included.

        Args:
            losses: Of :func:`.loss_terms`.
            bad_grads: Names of parameters with a bad gradient.

        Returns:
            By part, in the order of the model. One read from the device.
        """
        heads: dict[str, HeadState] = {}
        for name, _ in self.parameters:
            owner = self.owner_of_name(name)
            heads.setdefault(owner, HeadState()).n_params += 1
        for name in bad_grads:
            heads[self.owner_of_name(name)].bad_grads.append(name)
        values = _read({key: sum(term.detach().float().mean()
                                 for term in terms)
                        for key, terms in losses.items()})
        for key, terms in losses.items():
            owner = self._sure.get(key) or self._owner_of_terms(terms)
            if owner == UNKNOWN:
                owner = self._loss_owners.get(key, UNKNOWN)
            head = heads.setdefault(owner, HeadState())
            head.losses[key] = values[key]
            if values[key] - values[key] != 0:
                head.bad_losses.append(key)
        return heads

    def bad_weights(self) -> list[str]:
        """Names of parameters, frozen ones too, that are not finite.

        One read from the device.
        """
        names = list(self._weights)
        return [names[i] for i in bad_tensors(list(self._weights.values()))]


def _read(scalars: Mapping[str, Any]) -> dict[str, float]:
    if not scalars:
        return {}
    values = list(scalars.values())
    # Together on one device: each transfer by itself would be a read.
    stacked = torch.stack([value.to(values[0].device) for value in values])
    return dict(zip(scalars, stacked.tolist()))
