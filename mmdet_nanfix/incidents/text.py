"""Put an incident into words: one line for a console, one paragraph.

Both are made from a record as the log holds it, so that what was printed can
be had again from the file.
"""
from __future__ import annotations

import io
import textwrap
from typing import Any, Mapping

from .records import Incident, short_source

__all__ = ['IncidentText', 'Summary']

Record = Mapping[str, Any]

_SAVED = ('retried', 'rescued_fp32_head')
_WHAT = {'backward': 'gradients', 'params': 'weights', 'buffers': 'buffers',
         'input': 'input', 'step': 'weights'}


def _dict(value: Any) -> Record:
    """What a key holds, where that is an object."""
    return value if isinstance(value, dict) else {}


class IncidentText:
    """Words for one incident.

    Args:
        record: The incident as :meth:`.Incident.to_dict` or the log gives it.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._where: Record = record.get('where') or {}
        self._origin: Record = record.get('origin') or {}
        self._cause = _dict(record.get('cause'))

    @property
    def heads(self) -> dict[str, str]:
        """``fine``, or what was bad, of each head that is worth a word.

        A part without losses of its own only passes on what a head did.
        """
        blamed = self._where.get('head')
        return {name: _of_head(state)
                for name, state in (self._record.get('heads') or {}).items()
                if state.get('losses') or name == blamed}

    @property
    def scale(self) -> str:
        """The loss scale, and the next where that is another."""
        scale = self._record.get('loss_scale') or {}
        before, after = scale.get('before'), scale.get('after')
        shown = [f'{value:g}' if isinstance(value, (int, float))
                 else str(value) for value in (before, after)]
        return shown[0] if before == after else ' -> '.join(shown)

    @property
    def line(self) -> str:
        """One line for the console."""
        record = self._record
        heads = ', '.join(f'{name}: {said}'
                          for name, said in self.heads.items())
        ranks = record.get('ranks')
        if ranks:
            heads += f' (began on rank {", ".join(map(str, ranks))})'
        counts = record.get('counts') or {}
        lost = '' if record.get('action') in _SAVED else (
            f' ({counts.get("consecutive")} in a row, '
            f'{counts.get("total")} in all)')
        cause = self._cause
        why = [f'{cause.get("code")} {cause.get("title")}'] if cause else []
        began = [item for item in (self._began(), *self._images()) if item]
        said = '; '.join([
            f'{self._what()} at {self._at()}, loss scale {self.scale}' + (
                f': {", ".join(began)}' if began else ''),
            heads or 'no head is known', *why, self._done() + lost])
        # A name may hold a line break.
        return ' '.join(said.split())

    def paragraph(self, width: int = 79) -> str:
        """All of it, for somebody who has never seen one."""
        cause = self._cause
        text = [f'{self._at()}: {self._what()}.', *self._story()]
        blamed = self._images()
        if blamed:
            text.append(f'To blame: {", ".join(blamed)}.')
        evidence = cause.get('evidence') or []
        evidence = evidence if isinstance(evidence, list) else [str(evidence)]
        if cause:
            text.append(f'Cause: {cause.get("code")}, {cause.get("title")}.')
        tests = [*evidence, *[
            test for test in self._origin.get('tests') or []
            if not any(test in line for line in evidence)]]
        if tests:
            text.append(f'Tried and seen: {"; ".join(tests)}.')
        if cause.get('advice'):
            text.append(f'What helps: {cause["advice"]}')
        fine = [name for name, said in self.heads.items() if said == 'fine']
        if fine:
            text.append(f'Fine in that step: {", ".join(fine)}.')
        text.append(f'Loss scale {self.scale}; {self._done()}.')
        told = textwrap.fill(' '.join(part for part in text if part), width,
                             subsequent_indent='  ', break_long_words=False,
                             break_on_hyphens=False)
        patch = cause.get('config_patch')
        return told + (
            '\n  To paste into a config that has yours as its _base_:\n'
            + textwrap.indent(patch, '    ') if patch else '')

    def _story(self) -> list[str]:
        """Where it began, with numbers, or why that is not known."""
        began, origin = self._began(), self._origin
        if not began:
            reason = self._record.get('replay')
            return [f'Where it began is not known: {reason}.'] * bool(reason)
        head = self._where.get('head')
        outputs = origin.get('outputs') or []
        half = any(value.get('dtype') == 'float16' for value in outputs)
        return [f'It began {"in " + head if head else "before any head"}: '
                f'{began}.',
                _values('What went in:', origin.get('inputs') or []),
                _values('What came out:', outputs),
                *['float16 ends at 65504.'] * half]

    def _began(self) -> str | None:
        """Where it began, in one clause; None where no replay has shown it."""
        where, origin = self._where, self._origin
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
        at = f' at {short_source(origin["source"])}' if origin.get(
            'source') else ''
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

    def _images(self) -> list[str]:
        said = []
        images = self._record.get('images') or []
        for image in images[:3]:
            path, bad = image.get('img_path'), image.get('annotation')
            said.append(f'image {path}' if bad is None else
                        f'annotation {bad.get("index")} of {path} '
                        f'({bad.get("what")})')
        if len(images) > 3:
            said.append(f'{len(images) - 3} more')
        return said

    def _at(self) -> str:
        epoch = self._record.get('epoch')
        return f'iter {self._record.get("iter")}' + (
            '' if epoch is None else f' (epoch {epoch})')

    def _what(self) -> str:
        """What went wrong, in a few words."""
        if self._record.get('error') is not None:
            return f'the forward raised {self._record["error"]}'
        what = _WHAT.get(self._where.get('phase') or '', 'loss')
        module = f' {self._where.get("module")}' if what == 'buffers' else ''
        return f'non-finite {what}{module}'

    def _done(self) -> str:
        """What became of the step."""
        action = self._record.get('action')
        remedy = self._record.get('remedy') or {}
        if action == 'aborted':
            return 'step skipped, and training was stopped'
        if action not in _SAVED:
            return 'step skipped'
        scale, fp32 = remedy.get('scale'), remedy.get('fp32')
        how = [*[f'with {", ".join(fp32 or ())} in fp32'] * bool(fp32),
               *([f'at loss scale {scale:g}']
                 if isinstance(scale, (int, float)) else [])]
        return ' '.join(['step made again', *[' and '.join(how)] * bool(how)]
                        ) + ', nothing lost'


def _of_head(state: Record) -> str:
    """``fine``, or what was bad."""
    losses = state.get('losses') or {}
    said = [f'{key} {losses.get(key)}' for key in
            state.get('bad_losses') or ()]
    grads = state.get('bad_grads')
    if grads:
        said.append(f'{len(grads)} of {state.get("n_params")} parameters '
                    'with bad gradients')
    return ', '.join(said) or 'fine'


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


class Summary:
    """Incidents counted by phase and head, for the end of a run.

    Attributes:
        rows: ``{(phase, head): [incidents, first iter, last iter]}``.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[int]] = {}

    def add(self, incident: Incident) -> None:
        """Count one incident."""
        key = (incident.where.phase or '?', incident.where.head or '?')
        row = self.rows.setdefault(key, [0, incident.iter, incident.iter])
        row[0] += 1
        row[2] = incident.iter

    def text(self, width: int = 79) -> str:
        """The table as plain text, for a log file."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table('phase', 'head', 'incidents', 'first iter', 'last iter')
        for (phase, head), counts in self.rows.items():
            table.add_row(Text(phase), Text(head), *map(str, counts))
        out = io.StringIO()
        Console(file=out, width=width).print(table)
        return out.getvalue().rstrip()
