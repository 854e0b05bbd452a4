"""What a failed step shows: the state of each head, and where it began.

First as far as it shows without a replay, then with what a replay has found.
"""
from __future__ import annotations

from typing import (
    Any,
    Callable,
    Collection,
    Mapping,
    Sequence,
)

from .finite import kind_of
from .heads import UNKNOWN, Parts
from .incidents import HeadState, Where
from .origins import Record
from .search import Findings
from .sites import Site
from .trial import Raised

__all__ = ['first_look', 'origin_of', 'refined', 'where_raised']

_GIVEN = {'input': 'input', 'annotation': 'input', 'weight': 'params',
          'buffer': 'buffers'}


def first_look(parts: Parts, heads: Mapping[str, HeadState], loss_bad: bool,
               bad_buffers: Sequence[str], flagged: bool,
               meant: Collection[str] = ()) -> Where:
    """Phase and head as far as they show without a replay.

    Args:
        parts: Of the model.
        heads: Their state.
        loss_bad: Whether a loss is not finite.
        bad_buffers: Names of buffers that are not.
        flagged: Whether a loss or a buffer is bad on any rank.
        meant: Names of weights that hold infinities on purpose.
    """
    weights = [name for name in parts.bad_weights() if name not in meant]
    if weights:
        return Where(phase='params', module=weights[0].rpartition('.')[0],
                     head=parts.owner_of_name(weights[0]))
    with_losses = [state for state in heads.values() if state.losses]
    bad = {name: state for name, state in heads.items() if state.bad_losses}
    if bad:
        name, state = next(iter(bad.items()))
        # Where all heads are bad, what they share is to blame.
        shared = len(bad) == len(with_losses) > 1
        return Where(phase='loss',
                     head=None if shared or name == UNKNOWN else name,
                     kind=kind_of(state.losses[state.bad_losses[0]]))
    if bad_buffers and not loss_bad:
        return Where(phase='buffers', module=bad_buffers[0],
                     head=parts.owner_of_name(bad_buffers[0]))
    if flagged:
        return Where(phase='loss')
    return Where(phase='backward', head=_first_backward(heads))


def _first_backward(heads: Mapping[str, HeadState]) -> str | None:
    """The part where a bad gradient most likely began.

    Gradients flow from the losses down, so a part with losses of its own
    comes before one without; among those the one with the largest bad share.
    """
    bad = {name: state for name, state in heads.items() if state.bad_grads}
    if not bad:
        return None
    own = {name: len(state.bad_grads) / max(state.n_params, 1)
           for name, state in bad.items() if state.losses}
    if own:
        return max(own, key=lambda name: own[name])
    # The modules come in the order of the forward: the last is nearest.
    return list(bad)[-1]


def where_raised(raised: Raised, parts: Parts,
                 running: str | None = None) -> Where:
    """Where an exception was raised.

    Args:
        raised: It.
        parts: Of the model.
        running: The operation of torch that raised, where it was one.
    """
    site = raised.site
    return Where(phase='loss' if site.in_loss else 'forward',
                 module=site.module or None,
                 op=raised.op or running or site.function,
                 source=site.source, head=_owner(site, parts))


def _owner(site: Site, parts: Parts) -> str | None:
    return parts.owner_of_name(f'{site.module}.') if site.module else None


def refined(where: Where, found: Findings, parts: Parts,
            by_step: Callable[[str], str | None]) -> Where:
    """Where it began, with what a replay has found.

    Args:
        where: Of the first look.
        found: Of the search.
        parts: Of the model.
        by_step: Called with the name of a bad weight: name of the
            optimizer, where it has made it so.
    """
    origin = found.origin
    if origin is None:
        return where
    if origin.given is not None:
        return _where_given(origin, parts, by_step)
    site = origin.site
    module = site.module or None
    phase = 'loss' if site.in_loss else 'forward'
    if module is not None and module.startswith('data_preprocessor'):
        phase = 'input'
    elif found.failed == 'grads':
        phase = 'backward'
    head = _owner(site, parts)
    if found.failed == 'buffers' and where.phase == 'buffers':
        phase, head, module = 'buffers', where.head, where.module
    if phase == 'input':
        head = None
    return Where(phase=phase, head=head, module=module, level=site.level,
                 op=origin.op, source=site.source, kind=_kind(origin))


def _where_given(origin: Record, parts: Parts,
                 by_step: Callable[[str], str | None]) -> Where:
    kind, name = origin.given or ('', '')
    phase = _GIVEN[kind]
    if phase == 'input':
        return Where(phase=phase, kind=_kind(origin))
    step = by_step(name) if kind == 'weight' else None
    return Where(phase='step' if step else phase, op=step,
                 head=parts.owner_of_name(name), kind=_kind(origin),
                 module=name if kind == 'buffer' else (
                     name.rpartition('.')[0]))


def _kind(origin: Record) -> str | None:
    counts = origin.outputs[0] if origin.outputs else {}
    return next((kind for kind in ('nan', 'inf', '-inf')
                 if counts.get(kind)), None)


def origin_of(found: Findings) -> dict[str, Any] | None:
    """All that is known of an origin, for the log."""
    origin = found.origin
    if origin is None:
        return None
    return {
        'op': origin.op,
        'source': origin.site.source,
        'function': origin.site.function,
        'module': origin.site.module,
        'given': list(origin.given) if origin.given else None,
        'in_backward': origin.backward,
        'reached': {'loss': 'the loss', 'grads': 'gradients',
                    'buffers': 'buffers', 'raised': 'an exception'}.get(
                        found.failed or ''),
        'inputs': origin.inputs,
        'outputs': origin.outputs,
        'others': [f'{other.op} at {other.site.source}'
                   for other in found.others],
        'tests': _tests(found),
    }


def _tests(found: Findings) -> list[str]:
    """All replays and what they showed, each once."""
    named = [f'{name}: {replay.words}'
             for name, replay in found.replays.items() if name != 'first']
    return [test for test in found.tests
            if not any(test in line for line in named)] + named

