"""What helps: one paragraph, and a change of the config where there is one.

A change is proposed where a replay of the failing batch has shown that it
helps; where nothing could be tried, the words say so. What people try in
vain is named as well.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, List, Mapping, Tuple

from .causes import Reading
from .incidents import Where, short_source

__all__ = ['Known', 'advise', 'as_config']

Advice = Tuple[List[str], Dict[str, Any]]
Place = Tuple[str, Mapping[str, Any]]

_SCALE_IS_INNOCENT = ('The loss is bad before it is multiplied by the loss '
                      'scale: a lower one does not help.')
_EPS_IS_INNOCENT = ('Nor does an eps of the optimizer, which comes after the '
                    'gradients.')
_CLIP = ('Clip by norm, not by value: that keeps the direction, and one '
         'number bounds the step.')


@dataclasses.dataclass
class Known:
    """What advice is made from.

    Attributes:
        found: Of the search and the experiments.
        where: Of the incident.
        half: Whether the run is in half precision.
        scale: Loss scale of the step.
        start: Loss scale that the run started with.
        norm: Usual gradient norm of the last accepted steps, or None.
        rate: Learning rate.
        safe_rate: One whose step is a hundredth of the weights, or None.
        update_is_bad: Whether the last step was longer than half of the
            weights.
        growth: Whether losses or gradients had grown.
        absurd: Whether the gradient of the saved step would be absurd.
        eps: The smallest of the optimizer, or None.
        moments: Of the optimizer's state.
        term: Path of the loss module whose term dominates, or None.
        term_weight: Its ``loss_weight``, or None.
        loss: Path of the loss module where it began, or None.
        loss_type: Its class.
        clips_anew: Whether a ``clip_grad`` cannot be merged with that of the
            config.
        by_hook: Whether settings are those of the hook.
        place: Gives for the path of a module its place in the config, and
            what must stand there besides; or None.
    """

    found: Any
    where: Where
    half: bool = False
    scale: float = 1.
    start: float = 1.
    norm: float | None = None
    rate: float = math.nan
    safe_rate: float | None = None
    update_is_bad: bool = False
    growth: bool = False
    absurd: bool = False
    eps: float | None = None
    moments: Reading | None = None
    term: str | None = None
    term_weight: float | None = None
    loss: str | None = None
    loss_type: str | None = None
    clips_anew: bool = False
    by_hook: bool = False
    place: Callable[[str], Place | None] = lambda name: (name, {})

    @property
    def forward_is_bad(self) -> bool:
        """Whether it failed before any gradient."""
        return self.found.failed in ('loss', 'raised', 'buffers')

    def proven(self, name: str) -> bool:
        """Whether that replay made the whole step finite."""
        return name in self.found.proven


def advise(code: str, known: Known) -> tuple[str, str | None]:
    """Advice in words, and a config patch that can be pasted.

    Args:
        code: Of :func:`.verdict`.
        known: What it is made from.

    Returns:
        Words, and Python for a config file, or None.
    """
    words, changes = _BY_CODE[code](known)
    if known.by_hook:
        changes = _to_hook(changes)
    if known.forward_is_bad and known.half and code != 'NF101':
        words = [*words, _SCALE_IS_INNOCENT]
        if code in ('NF102', 'NF103', 'NF107'):
            words.append(_EPS_IS_INNOCENT)
    return ' '.join(words), as_config(changes) if changes else None


def _to_hook(changes: dict[str, Any]) -> dict[str, Any]:
    """The same with settings where the hook has them, whose win."""
    wrapper = dict(changes.get('optim_wrapper', {}))
    settings = wrapper.pop('nanfix', None)
    if settings is None:
        return changes
    changes = {**changes, 'optim_wrapper': wrapper, 'default_hooks': {
        'nanfix': {'type': 'NanGuardHook', **settings}}}
    return {key: value for key, value in changes.items() if value}


def as_config(changes: Mapping[str, Any]) -> str:
    """Python for a config file: one assignment a top-level key."""
    return '\n'.join(f'{key} = {_code(value)}'
                     for key, value in changes.items())


def _code(value: Any) -> str:
    if isinstance(value, dict) and all(key.isidentifier() for key in value):
        inside = ', '.join(f'{key}={_code(item)}'
                           for key, item in value.items())
        return f'dict({inside})'
    return repr(value)


def _nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split('.')):
        value = {name: value}
    return value


def _wrapper(**settings: Any) -> dict[str, Any]:
    return {'optim_wrapper': settings}


def _down(value: float) -> float:
    """Rounded down to a power of ten times 1, 2 or 5."""
    if value <= 0 or not math.isfinite(value):
        return value
    power = 10. ** math.floor(math.log10(value))
    digit = next(step for step in (5, 2, 1) if step * power <= value)
    return float(f'{digit * power:.6g}')


def _scale(known: Known) -> Advice:
    fits = known.found.fits
    if fits is None:
        return ['A lower loss scale helps; it backs off by itself.'], {}
    grown = known.scale > known.start
    name = 'max_scale' if grown else 'init_scale'
    words = [f'The step is finite at a loss scale of {fits:g}, and the loss '
             'scale has gone down by itself.']
    words.append('That happens now and then after a growth and needs '
                 'nothing; the patch keeps it from growing so far.' if grown
                 else 'The patch starts there.')
    if known.norm is None:
        words.append('The batch was not saved: no step had been accepted yet '
                     'to compare its gradient with.')
    return words, _wrapper(nanfix={name: fits})


def _half(known: Known) -> Advice:
    found, where = known.found, known.where
    if found.part is not None:
        words = [f'In fp32 {found.part} does not leave the range; the rest '
                 'stays in half.']
        if not known.proven('part in fp32'):
            return [*words, 'The step fails later all the same, so that '
                    'there is no change that is known to help.'], {}
        changes: dict[str, Any] = {'nanfix': {'fp32_modules': [found.part]}}
        if found.fits is not None:
            changes['nanfix']['init_scale'] = found.fits
        return _bounded(known, words, changes)
    if known.proven('bfloat16'):
        return ['Everything in fp32 helps, this part alone does not: what it '
                "hands on leaves half's range as well. bfloat16 has the "
                'range of fp32 (on a GPU of 2020 or newer).'], _wrapper(
                    dtype='bfloat16')
    module = where.module or where.head or 'the model'
    return [f'fp32 helps. Bring down what {module} computes: its weights, '
            'or a normalization before it.'], {}


def _bounded(known: Known, words: list[str],
             changes: dict[str, Any]) -> Advice:
    """With a bound on the step, where its gradient is out of all bounds."""
    if known.absurd and known.norm is not None:
        bound = _down(known.norm)
        words = [*words, 'Its gradient is then far longer than any of late, '
                 'and such a step is not made; with the norm clipped its '
                 'length is bounded.', _CLIP]
        changes['clip_grad'] = _clip(known, bound)
    return words, _wrapper(**changes)


def _clip(known: Known, bound: float) -> dict[str, Any]:
    """A clipping for the config, whatever is there."""
    anew = {'_delete_': True} if known.clips_anew else {}
    return {**anew, 'max_norm': bound, 'norm_type': 2}


def _loss(known: Known) -> Advice:
    found = known.found
    if found.mode is not None:
        name = f'{found.mode} in fp32'
        words = [f'Computed in fp32 ({found.mode}) it is finite.']
        if known.loss_type is not None:
            words.append(f'For {known.loss} alone: type='
                         f'{"Fp32" + known.loss_type!r}.')
        if not known.proven(name):
            return [*words, 'The step fails later all the same.'], {}
        changes: dict[str, Any] = {'nanfix': {'fp32': found.mode}}
        return _bounded(known, words, changes)
    return _half(known)


def _annotation(known: Known) -> Advice:
    blamed = [image for image in known.found.images or ()
              if image['annotation']]
    named = [f'annotation {image["annotation"]["index"]} of '
             f'{image["img_path"]} (id {image["img_id"]}): '
             f'{image["annotation"]["what"]}' for image in blamed[:3]]
    more = f', and {len(blamed) - 3} more' if len(blamed) > 3 else ''
    return [f'Mend or remove {"; ".join(named)}{more}.' if named else
            'Mend the annotations of this batch that are not finite.',
            'The step was skipped; no setting makes up for it.'], {}


def _label(known: Known) -> Advice:
    words, _ = _annotation(known)
    return [*words, 'Check num_classes of the heads and metainfo.classes of '
            'the dataset against the annotation file.'], {}


def _pixels(known: Known) -> Advice:
    found = known.found
    if found.normalised is not None:
        mean, std = found.normalised
        words = ['The mean and standard deviation of data_preprocessor do '
                 'not fit these pixels (0-1 against 0-255). The patch has '
                 "ImageNet's; take those of your weights."]
        if not known.proven('normalised'):
            return words, {}
        return words, {'model': {'data_preprocessor': {
            'mean': mean, 'std': std}}}
    images = [str(image['img_path']) for image in found.images or ()]
    if images:
        return [f'Check the file {", ".join(images[:3])}: its pixels are '
                'not finite or far outside of 0 to 255. The step was '
                'skipped; no setting makes up for it.'], {}
    return ['Check mean and std of data_preprocessor, and the pipeline '
            'before it: 0-1 against 0-255, a std of 0.'], {}


def _full(known: Known) -> Advice:
    where = known.where
    at = f' at {short_source(where.source)}' if where.source else ''
    words = [f'Precision is not the cause: {where.op or "the operation"}{at} '
             'is not finite in fp32 either, nor would a learning rate of 0 '
             'have helped, since weights do not move in a replay.']
    if known.proven('losses mended') and known.loss and known.loss_type:
        words.append('The fp32 form of this loss has a formula that is '
                     'finite there.')
        place = known.place(known.loss)
        if place is not None:
            return words, {'model': _nested(
                place[0], {**place[1], 'type': f'Fp32{known.loss_type}'})}
        return words, {}
    words.append(_HINTS.get(where.op or '', 'Look at what goes into it: a '
                            'zero, a negative or a huge number.'))
    words.append('A stride above the kernel size is no cause in PyTorch.'
                 if 'conv' in (where.op or '') else '')
    return [word for word in words if word], {}


_DIVISOR = 'The divisor was 0: give it an eps.'
_HINTS = {
    'log': 'The argument was 0 or less: give it an eps, or clamp it.',
    'div': _DIVISOR, 'div_': _DIVISOR, 'reciprocal': _DIVISOR,
    'exp': 'exp overflows in fp32 above 88.7: the branch before it has run '
           'away; clamp its output, and look at its learning rate.',
    'pow': 'The slope of a power below 1 is infinite at 0: an exponent of at '
           'least 1, or an eps.',
    'sqrt': 'The slope of a root is infinite at 0, and a root of less than 0 '
            'is NaN: give it an eps.',
    '_softmax': 'A row was masked as a whole: look at the masks, at img_shape'
                ' and at batch_input_shape of the image.',
    'native_layer_norm': 'It normalised a row of equal numbers without an '
                         'eps: its eps must not be 0.',
    'native_batch_norm': 'A running variance below 0, or an eps of 0: load '
                         'statistics that are whole.',
}


def _diverging(known: Known) -> Advice:
    found = known.found
    if found.term is not None:
        return _dominant(known, *found.term)
    changes: dict[str, Any] = {}
    words = ['The training had left its way before this step.'
             if known.update_is_bad or known.growth or not known.absurd else
             'The batch is finite at a lower loss scale, but its gradient is '
             'far longer than any of late: it was not stepped on.']
    if known.update_is_bad and known.safe_rate:
        words.append(f'With a learning rate of {known.safe_rate:g} the last '
                     'step would have moved the weights by a hundredth of '
                     'their length; warm up to it. Load weights from before: '
                     'these have moved, so that it could not be tried on '
                     'this batch.')
        changes['optimizer'] = {'lr': known.safe_rate}
    if known.norm is not None and math.isfinite(known.norm):
        words.append(_CLIP)
        changes['clip_grad'] = _clip(known, _down(known.norm))
        if not known.update_is_bad and found.fits is not None:
            changes['nanfix'] = {'init_scale': found.fits}
    return words, _wrapper(**changes) if changes else {}


def _dominant(known: Known, key: str, factor: float) -> Advice:
    words = [f'{key} is so much larger than all other losses that its '
             'gradients leave the range. A lower loss scale would only hide '
             'that it drowns them.']
    weight = known.term_weight
    if known.term is None or weight is None:
        return [*words, f'Lower its weight by {factor:g}.'], {}
    words.append(f'{known.term}.loss_weight is {weight:g}; with '
                 f'{weight * factor:g} the step is finite.')
    place = known.place(known.term)
    if place is None or not known.proven('term lowered'):
        return words, {}
    return words, {'model': _nested(place[0], {
        **place[1], 'loss_weight': float(f'{weight * factor:.6g}')})}


def _weights(known: Known) -> Advice:
    where = known.where
    return [f'The weights of {where.module or "the model"} are not finite as '
            'they were given, and no setting mends them: load a checkpoint '
            'from before, or leave this layer out of it.'], {}


def _buffers(known: Known) -> Advice:
    where = known.where
    return [f'The buffer {where.module or ""} is not finite as it was given: '
            'running statistics stay so. Load a checkpoint from before.'], {}


def _state(known: Known) -> Advice:
    if known.eps == 0:
        return ['Give the optimizer an eps. The weights are spoiled already: '
                'load them from before. It could not be tried on this '
                'batch.'], _wrapper(optimizer={'eps': 1e-8})
    if known.moments is not None and known.moments.bad:
        return [f'{known.moments.words[:1].upper()}{known.moments.words[1:]}:'
                ' every further update spoils the weights. Load a checkpoint '
                'from before, or its weights alone (load_from without '
                '--resume).'], {}
    return ['The optimizer computes its update in the dtype of half weights, '
            f'where an eps of {known.eps or 0:g} is 0: keep weights in fp32, '
            'or take an eps of 1e-4.'], _wrapper(optimizer={'eps': 1e-4})


def _chance(known: Known) -> Advice:
    return ['The same batch, weights and random numbers fail one time and '
            'not the other: an operation that is not deterministic, memory '
            'that was not written to, a defective device. Nothing in the '
            'config explains it; try other hardware, or '
            'torch.use_deterministic_algorithms.'], {}


def _unknown(known: Known) -> Advice:
    reason = known.found.replay
    return ['Nothing that was tried explains it' + (
        f' ({reason})' if reason else '') + '; the step was skipped.'], {}


_BY_CODE: dict[str, Callable[[Known], Advice]] = {
    'NF101': _scale, 'NF102': _half, 'NF103': _loss, 'NF104': _annotation,
    'NF105': _pixels, 'NF106': _label, 'NF107': _full, 'NF108': _diverging,
    'NF109': _weights, 'NF110': _buffers, 'NF111': _state,
    'NF112': _chance, 'NF113': _unknown,
}
