"""Incidents in words: one line for a console, one paragraph for a report.

Both are made from a record as the log holds it, so that what was printed can
be had again from the file.
"""
from __future__ import annotations

import os
import textwrap
from typing import Any, Mapping

__all__ = [
    'done_in_words', 'head_in_words', 'heads_told', 'one_line', 'paragraph',
    'scale_in_words', 'short_source', 'where_in_words'
]

Record = Mapping[str, Any]

_SAVED = ('retried', 'rescued_fp32_head')
_WHAT = {'backward': 'gradients', 'params': 'weights', 'buffers': 'buffers',
         'input': 'input', 'step': 'weights'}


def short_source(source: str) -> str:
    """``file:line`` without the path to the installed packages."""
    path = source.replace('\\', '/')
    _, found, below = path.rpartition('site-packages/')
    if found:
        return below
    try:
        here = os.path.relpath(source) if os.path.isabs(source) else source
    except (OSError, ValueError):
        # No working directory any more, or another drive.
        return source
    return source if here.startswith('..') else here


def head_in_words(state: Record) -> str:
    """``fine``, or what was bad."""
    losses = state.get('losses') or {}
    said = [f'{key} {losses.get(key)}' for key in
            state.get('bad_losses') or ()]
    grads = state.get('bad_grads')
    if grads:
        said.append(f'{len(grads)} of {state.get("n_params")} parameters '
                    'with bad gradients')
    return ', '.join(said) or 'fine'


def where_in_words(record: Record) -> str | None:
    """Where it began, in one clause; None where no replay has shown it."""
    where, origin = record.get('where') or {}, record.get('origin')
    if not origin:
        return None
    kind = where.get('kind') or 'not finite'
    place = where.get('module') or where.get('head') or 'the model'
    given = origin.get('given')
    if where.get('phase') == 'step':
        return f'{where.get("op")} made the weights of {place} {kind}'
    if given:
        what, name = given
        return {
            'input': f'the pixels of {name} hold {kind}',
            'annotation': f'an annotation holds {kind}',
            'weight': f'the weight {name} holds {kind}',
            'buffer': f'the buffer {name} holds {kind}'}[what]
    at = f' at {short_source(origin["source"])}' if origin.get('source') \
        else ''
    level = where.get('level')
    if level is not None:
        at += f', feature level {level}'
    op = origin['op']
    if op == '_to_copy':
        outputs = origin.get('outputs') or [{}]
        op = f'a cast to {outputs[0].get("dtype")}'
    if origin.get('in_backward'):
        return f'the gradient of {op} in {place} is {kind}{at}'
    return f'{op} in {place} gave {kind}{at}'


def _images(record: Record) -> list[str]:
    said = []
    images = record.get('images') or []
    for image in images[:3]:
        path, bad = image.get('img_path'), image.get('annotation')
        said.append(f'image {path}' if bad is None else
                    f'annotation {bad.get("index")} of {path} '
                    f'({bad.get("what")})')
    if len(images) > 3:
        said.append(f'{len(images) - 3} more')
    return said


def scale_in_words(record: Record) -> str:
    """The loss scale, and the next where that is another."""
    scale = record.get('loss_scale') or {}
    before, after = scale.get('before'), scale.get('after')
    shown = [f'{value:g}' if isinstance(value, (int, float)) else str(value)
             for value in (before, after)]
    return shown[0] if before == after else ' -> '.join(shown)


def _at(record: Record) -> str:
    epoch = record.get('epoch')
    return f'iter {record.get("iter")}' + (
        '' if epoch is None else f' (epoch {epoch})')


def _what(record: Record) -> str:
    """What went wrong, in a few words."""
    where = record.get('where') or {}
    if record.get('error') is not None:
        return f'the forward raised {record["error"]}'
    what = _WHAT.get(where.get('phase') or '', 'loss')
    module = f' {where.get("module")}' if what == 'buffers' else ''
    return f'non-finite {what}{module}'


def heads_told(record: Record) -> dict[str, Record]:
    """Those worth a word.

    A part without losses of its own only passes on what a head did.
    """
    blamed = (record.get('where') or {}).get('head')
    return {name: state for name, state in (record.get('heads') or {}).items()
            if state.get('losses') or name == blamed}


def _cause(record: Record) -> Record:
    cause = record.get('cause')
    return cause if isinstance(cause, dict) else {}


def done_in_words(record: Record) -> str:
    """What became of the step."""
    action, remedy = record.get('action'), record.get('remedy') or {}
    if action == 'aborted':
        return 'step skipped, and training was stopped'
    if action not in _SAVED:
        return 'step skipped'
    scale = remedy.get('scale')
    how = [f'at loss scale {scale:g}'] if isinstance(scale, (int, float)) \
        else []
    if remedy.get('fp32'):
        how.insert(0, f'with {", ".join(remedy["fp32"])} in fp32')
    return ' '.join(['step made again', *[' and '.join(how)] * bool(how)]
                    ) + ', nothing lost'


def one_line(record: Record) -> str:
    """An incident for the console."""
    heads = ', '.join(f'{name}: {head_in_words(state)}'
                      for name, state in heads_told(record).items())
    ranks = record.get('ranks')
    if ranks:
        heads += f' (began on rank {", ".join(map(str, ranks))})'
    counts = record.get('counts') or {}
    lost = '' if record.get('action') in _SAVED else (
        f' ({counts.get("consecutive")} in a row, '
        f'{counts.get("total")} in all)')
    cause = _cause(record)
    why = [f'{cause.get("code")} {cause.get("title")}'] if cause else []
    began = [item for item in (where_in_words(record), *_images(record))
             if item]
    scale = scale_in_words(record)
    said = '; '.join([
        f'{_what(record)} at {_at(record)}, loss scale {scale}' + (
            f': {", ".join(began)}' if began else ''),
        heads or 'no head is known', *why,
        done_in_words(record) + lost])
    # A name may hold a line break.
    return ' '.join(said.split())


def _values(title: str, values: list[Record]) -> str:
    said = []
    for value in values[:3]:
        shape = ' x '.join(map(str, value.get('shape') or ())) or 'scalar'
        amax = value.get('amax')
        bad = ', '.join(f'{value[kind]} {kind}' for kind in
                        ('nan', 'inf', '-inf') if value.get(kind))
        said.append(f'{value.get("dtype")} {shape}' + (
            f', largest {amax:.4g}' if isinstance(amax, (int, float))
            else '') + (f', {bad}' if bad else ''))
    return f'{title} {"; ".join(said)}.' if said else ''


def paragraph(record: Record, width: int = 79) -> str:
    """An incident for somebody who has never seen one."""
    where, origin = record.get('where') or {}, record.get('origin') or {}
    began = where_in_words(record)
    text = [f'{_at(record)}: {_what(record)}.']
    if began:
        head = where.get('head')
        text.append(f'It began {"in " + head if head else "before any head"}:'
                    f' {began}.')
        text.append(_values('What went in:', origin.get('inputs') or []))
        outputs = origin.get('outputs') or []
        text.append(_values('What came out:', outputs))
        if any(value.get('dtype') == 'float16' for value in outputs):
            text.append('float16 ends at 65504.')
    elif record.get('replay'):
        text.append(f'Where it began is not known: {record["replay"]}.')
    blamed = _images(record)
    if blamed:
        text.append(f'To blame: {", ".join(blamed)}.')
    cause = _cause(record)
    evidence = cause.get('evidence') or []
    evidence = evidence if isinstance(evidence, list) else [str(evidence)]
    if cause:
        text.append(f'Cause: {cause.get("code")}, {cause.get("title")}.')
    tests = [*evidence, *[test for test in origin.get('tests') or []
                          if not any(test in line for line in evidence)]]
    if tests:
        text.append(f'Tried and seen: {"; ".join(tests)}.')
    if cause.get('advice'):
        text.append(f'What helps: {cause["advice"]}')
    fine = [name for name, state in heads_told(record).items()
            if head_in_words(state) == 'fine']
    if fine:
        text.append(f'Fine in that step: {", ".join(fine)}.')
    text.append(f'Loss scale {scale_in_words(record)}; '
                f'{done_in_words(record)}.')
    told = textwrap.fill(' '.join(part for part in text if part), width,
                         subsequent_indent='  ', break_long_words=False,
                         break_on_hyphens=False)
    patch = cause.get('config_patch')
    if patch:
        told += ('\n  To paste into a config that has yours as its _base_:'
                 '\n') + textwrap.indent(
            patch, '    ')
    return told
