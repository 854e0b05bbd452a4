"""Advise what helps, and patch the config where that was seen to help.

A change is proposed where a replay of the failing batch has shown that it
helps; where nothing could be tried, the words say so. What people try in
vain is named as well.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, List, Mapping, Tuple

from ...incidents import Where, short_source
from ..context import RunContext
from ..findings import Counterfactual, Failure, Findings
from .config_patch import (
    LossModules,
    as_config,
    model_patch,
    optim_wrapper,
    rounded_down,
    to_hook,
)
from .symptoms import Symptom

__all__ = ['Case', 'advise']

Advice = Tuple[List[str], Dict[str, Any]]

_SCALE_IS_INNOCENT = ('The loss is bad before it is multiplied by the loss '
                      'scale: a lower one does not help.')
_EPS_IS_INNOCENT = ('Nor does an eps of the optimizer, which comes after the '
                    'gradients.')
_CLIP = ('Clip by norm, not by value: that keeps the direction, and one '
         'number bounds the step.')


@dataclasses.dataclass
class Case:
    """What advice is made from.

    Attributes:
        found: What replays have shown.
        where: Of the incident.
        context: Of the run.
        symptoms: Of :class:`.Symptoms`.
        losses: Modules that are named.
    """

    found: Findings
    where: Where
    context: RunContext
    symptoms: Mapping[str, Symptom] = dataclasses.field(default_factory=dict)
    losses: LossModules = dataclasses.field(default_factory=LossModules)

    def bad(self, name: str) -> bool:
        """Tell if a symptom was read, and is a reason."""
        return name in self.symptoms and self.symptoms[name].bad

    @property
    def forward_is_bad(self) -> bool:
        """Whether it failed before any gradient."""
        return self.found.failed in (Failure.LOSS, Failure.RAISED,
                                     Failure.BUFFERS)

    def proven(self, name: Counterfactual) -> bool:
        """Tell if that made the whole step finite."""
        return name in self.found.proven


def advise(code: str, case: Case) -> tuple[str, str | None]:
    """Advice in words, and a config patch that can be pasted.

    Args:
        code: Of :func:`.verdict`.
        case: What it is made from.

    Returns:
        Words, and Python for a config file, or None.
    """
    words, changes = _BY_CODE[code](case)
    if case.context.by_hook:
        changes = to_hook(changes)
    if case.forward_is_bad and case.context.half and code != 'NF101':
        words = [*words, _SCALE_IS_INNOCENT]
        if code in ('NF102', 'NF103', 'NF107'):
            words.append(_EPS_IS_INNOCENT)
    return ' '.join(words), as_config(changes) if changes else None


def _scale(case: Case) -> Advice:
    fits = case.found.fits
    if fits is None:
        return ['A lower loss scale helps; it backs off by itself.'], {}
    grown = case.context.scale > case.context.start
    name = 'max_scale' if grown else 'init_scale'
    words = [f'The step is finite at a loss scale of {fits:g}, and the loss '
             'scale has gone down by itself.']
    words.append('That happens now and then after a growth and needs '
                 'nothing; the patch keeps it from growing so far.' if grown
                 else 'The patch starts there.')
    if case.context.norm is None:
        words.append('The batch was not saved: no step had been accepted yet '
                     'to compare its gradient with.')
    return words, optim_wrapper(nanfix={name: fits})


def _half(case: Case) -> Advice:
    found, where = case.found, case.where
    if found.part is not None:
        words = [f'In fp32 {found.part} does not leave the range; the rest '
                 'stays in half.']
        if not case.proven(Counterfactual.PART_FP32):
            return [*words, 'The step fails later all the same, so that '
                    'there is no change that is known to help.'], {}
        changes: dict[str, Any] = {'nanfix': {'fp32_modules': [found.part]}}
        if found.fits is not None:
            changes['nanfix']['init_scale'] = found.fits
        return _bounded(case, words, changes)
    if case.proven(Counterfactual.BFLOAT16):
        return ['Everything in fp32 helps, this part alone does not: what it '
                "hands on leaves half's range as well. bfloat16 has the "
                'range of fp32 (on a GPU of 2020 or newer).'], optim_wrapper(
                    dtype='bfloat16')
    module = where.module or where.head or 'the model'
    return [f'fp32 helps. Bring down what {module} computes: its weights, '
            'or a normalization before it.'], {}


def _bounded(case: Case, words: list[str],
             changes: dict[str, Any]) -> Advice:
    """With a bound on the step, where its gradient is out of all bounds."""
    if case.bad('norm') and case.context.norm is not None:
        bound = rounded_down(case.context.norm)
        words = [*words, 'Its gradient is then far longer than any of late, '
                 'and such a step is not made; with the norm clipped its '
                 'length is bounded.', _CLIP]
        changes['clip_grad'] = _clip(case, bound)
    return words, optim_wrapper(**changes)


def _clip(case: Case, bound: float) -> dict[str, Any]:
    """A clipping for the config, whatever is there."""
    anew = {'_delete_': True} if case.context.clips_anew else {}
    return {**anew, 'max_norm': bound, 'norm_type': 2}


def _loss(case: Case) -> Advice:
    found = case.found
    if found.mode is not None:
        words = [f'Computed in fp32 ({found.mode}) it is finite.']
        if case.losses.kind is not None:
            words.append(f'For {case.losses.began} alone: type='
                         f'{"Fp32" + case.losses.kind!r}.')
        if not case.proven(Counterfactual.of_mode(found.mode)):
            return [*words, 'The step fails later all the same.'], {}
        changes: dict[str, Any] = {'nanfix': {'fp32': found.mode}}
        return _bounded(case, words, changes)
    return _half(case)


def _annotation(case: Case) -> Advice:
    blamed = [image for image in case.found.images or ()
              if image['annotation']]
    named = [f'annotation {image["annotation"]["index"]} of '
             f'{image["img_path"]} (id {image["img_id"]}): '
             f'{image["annotation"]["what"]}' for image in blamed[:3]]
    more = f', and {len(blamed) - 3} more' if len(blamed) > 3 else ''
    return [f'Mend or remove {"; ".join(named)}{more}.' if named else
            'Mend the annotations of this batch that are not finite.',
            'The step was skipped; no setting makes up for it.'], {}


def _label(case: Case) -> Advice:
    words, _ = _annotation(case)
    return [*words, 'Check num_classes of the heads and metainfo.classes of '
            'the dataset against the annotation file.'], {}


def _pixels(case: Case) -> Advice:
    found = case.found
    if found.normalised is not None:
        mean, std = found.normalised
        words = ['The mean and standard deviation of data_preprocessor do '
                 'not fit these pixels (0-1 against 0-255). The patch has '
                 "ImageNet's; take those of your weights."]
        if not case.proven(Counterfactual.NORMALISED):
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


def _full(case: Case) -> Advice:
    where = case.where
    at = f' at {short_source(where.source)}' if where.source else ''
    words = [f'Precision is not the cause: {where.op or "the operation"}{at} '
             'is not finite in fp32 either, nor would a learning rate of 0 '
             'have helped, since weights do not move in a replay.']
    losses = case.losses
    if case.proven(Counterfactual.LOSSES_MENDED) and (
            losses.began and losses.kind):
        words.append('The fp32 form of this loss has a formula that is '
                     'finite there.')
        return words, model_patch(case.context.place(losses.began),
                                  type=f'Fp32{losses.kind}')
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


def _diverging(case: Case) -> Advice:
    found = case.found
    if found.term is not None:
        return _dominant(case, *found.term)
    changes: dict[str, Any] = {}
    words = ['The training had left its way before this step.'
             if any(map(case.bad, ('update', 'growth')))
             or not case.bad('norm') else
             'The batch is finite at a lower loss scale, but its gradient is '
             'far longer than any of late: it was not stepped on.']
    safe_rate = case.context.safe_rate
    if case.bad('update') and safe_rate:
        words.append(f'With a learning rate of {safe_rate:g} the last '
                     'step would have moved the weights by a hundredth of '
                     'their length; warm up to it. Load weights from before: '
                     'these have moved, so that it could not be tried on '
                     'this batch.')
        changes['optimizer'] = {'lr': safe_rate}
    if case.context.norm is not None and math.isfinite(case.context.norm):
        words.append(_CLIP)
        changes['clip_grad'] = _clip(case, rounded_down(case.context.norm))
        if not case.bad('update') and found.fits is not None:
            changes['nanfix'] = {'init_scale': found.fits}
    return words, optim_wrapper(**changes) if changes else {}


def _dominant(case: Case, key: str, factor: float) -> Advice:
    words = [f'{key} is so much larger than all other losses that its '
             'gradients leave the range. A lower loss scale would only hide '
             'that it drowns them.']
    weight = case.losses.weight
    if case.losses.dominant is None or weight is None:
        return [*words, f'Lower its weight by {factor:g}.'], {}
    words.append(f'{case.losses.dominant}.loss_weight is {weight:g}; with '
                 f'{weight * factor:g} the step is finite.')
    if not case.proven(Counterfactual.TERM_LOWERED):
        return words, {}
    return words, model_patch(case.context.place(case.losses.dominant),
                              loss_weight=float(f'{weight * factor:.6g}'))


def _weights(case: Case) -> Advice:
    where = case.where
    return [f'The weights of {where.module or "the model"} are not finite as '
            'they were given, and no setting mends them: load a checkpoint '
            'from before, or leave this layer out of it.'], {}


def _buffers(case: Case) -> Advice:
    where = case.where
    return [f'The buffer {where.module or ""} is not finite as it was given: '
            'running statistics stay so. Load a checkpoint from before.'], {}


def _state(case: Case) -> Advice:
    if case.context.eps == 0:
        return ['Give the optimizer an eps. The weights are spoiled already: '
                'load them from before. It could not be tried on this '
                'batch.'], optim_wrapper(optimizer={'eps': 1e-8})
    if case.bad('moments'):
        words = case.symptoms['moments'].words
        return [f'{words[:1].upper()}{words[1:]}:'
                ' every further update spoils the weights. Load a checkpoint '
                'from before, or its weights alone (load_from without '
                '--resume).'], {}
    return ['The optimizer computes its update in the dtype of half weights, '
            f'where an eps of {case.context.eps or 0:g} is 0: keep weights in '
            'fp32, or take an eps of 1e-4.'], optim_wrapper(
                optimizer={'eps': 1e-4})


def _chance(case: Case) -> Advice:
    return ['The same batch, weights and random numbers fail one time and '
            'not the other: an operation that is not deterministic, memory '
            'that was not written to, a defective device. Nothing in the '
            'config explains it; try other hardware, or '
            'torch.use_deterministic_algorithms.'], {}


def _unknown(case: Case) -> Advice:
    reason = case.found.replay
    return ['Nothing that was tried explains it' + (
        f' ({reason})' if reason else '') + '; the step was skipped.'], {}


_BY_CODE: dict[str, Callable[[Case], Advice]] = {
    'NF101': _scale, 'NF102': _half, 'NF103': _loss, 'NF104': _annotation,
    'NF105': _pixels, 'NF106': _label, 'NF107': _full, 'NF108': _diverging,
    'NF109': _weights, 'NF110': _buffers, 'NF111': _state,
    'NF112': _chance, 'NF113': _unknown,
}
