from __future__ import annotations

import pytest
from helpers.incidents import incident

from mmdet_nanfix.incidents import IncidentText, Summary


def test_summary_is_one_line_that_names_the_heads():
    line = one_line(incident().to_dict())
    assert '\n' not in line
    assert 'iter 7 (epoch 2)' in line and '512 -> 256' in line
    assert ('rpn_head: fine, roi_head.bbox_head: loss_cls nan, 1 of 8 '
            'parameters with bad gradients') in line
    assert 'backbone' not in line
    assert '1 in a row, 3 in all' in line


WHERE = dict(phase='forward', head='roi_head.bbox_head',
             module='roi_head.bbox_head.fc_reg', level=None, op='linear',
             source='/x/site-packages/mmdet/heads/box.py:216', kind='inf')
ORIGIN = dict(op='linear', source=WHERE['source'], given=None,
              in_backward=False, tests=['with another image nothing fails'],
              inputs=[dict(shape=[512, 64], dtype='float16', amax=300.5,
                           nan=0, inf=0)],
              outputs=[dict(shape=[512, 4], dtype='float16', amax=65504.,
                            nan=0, inf=3)])


def one_line(record):
    return IncidentText(record).line


def paragraph(record):
    return IncidentText(record).paragraph()


def record(**changes):
    return {**incident().to_dict(), 'where': WHERE, 'origin': ORIGIN,
            **changes}


def test_a_line_says_where_it_began():
    line = one_line(record(images=[dict(img_path='a.jpg', img_id=1,
                                        annotation=None)]))
    assert ('linear in roi_head.bbox_head.fc_reg gave inf at '
            'mmdet/heads/box.py:216, image a.jpg;') in line
    assert '\n' not in line


@pytest.mark.parametrize('where, origin, said', [
    (dict(kind='nan'), dict(given=['input', 'a.jpg']),
     'the pixels of a.jpg hold nan'),
    (dict(kind='nan'), dict(given=['annotation', '?']),
     'an annotation holds nan'),
    (dict(kind='inf'), dict(given=['weight', 'a.weight']),
     'the weight a.weight holds inf'),
    (dict(kind='nan'), dict(given=['buffer', 'a.mean']),
     'the buffer a.mean holds nan'),
    (dict(phase='step', op='Adam.step', module='rpn_head.conv', kind='nan'),
     dict(given=['weight', 'x']),
     'Adam.step made the weights of rpn_head.conv nan'),
    (dict(level=2), {}, 'box.py:216, feature level 2'),
    (dict(), dict(in_backward=True),
     'the gradient of linear in roi_head.bbox_head.fc_reg is inf at'),
])
def test_each_kind_of_origin_has_its_words(where, origin, said):
    text = one_line(record(where={**WHERE, **where},
                           origin={**ORIGIN, **origin}))
    assert said in text


def test_a_paragraph_is_for_people():
    text = paragraph(record(images=[dict(img_path='a.jpg', annotation=dict(
        index=3, what='box of zero size 0 x 4'))]))
    flat = ' '.join(text.split())
    for said in (
            'iter 7 (epoch 2): non-finite loss.',
            'It began in roi_head.bbox_head: linear in '
            'roi_head.bbox_head.fc_reg gave inf',
            'What went in: float16 512 x 64, largest 300.5.',
            'What came out: float16 512 x 4, largest 6.55e+04, 3 inf.',
            'To blame: annotation 3 of a.jpg (box of zero size 0 x 4).',
            'Tried and seen: with another image nothing fails.',
            'Fine in that step: rpn_head.',
            'Loss scale 512 -> 256; step skipped.'):
        assert said in flat
    assert max(map(len, text.splitlines())) < 80


def test_why_nothing_was_found_is_said():
    text = paragraph(record(origin=None, replay='the replay ran out of '
                            'memory'))
    assert 'not known: the replay ran out of memory.' in ' '.join(
        text.split())


def test_a_whole_batch_is_not_listed():
    images = [dict(img_path=f'{index}.jpg', annotation=None)
              for index in range(16)]
    line = one_line(record(images=images))
    assert 'image 2.jpg, 13 more;' in line and '3.jpg' not in line


def test_a_folder_that_is_gone_and_a_name_of_two_lines(monkeypatch):
    def gone(path):
        raise FileNotFoundError

    monkeypatch.setattr('os.path.relpath', gone)
    images = [dict(img_path='a\nb.jpg', annotation=None)]
    line = one_line(record(images=images, origin={
        **ORIGIN, 'source': '/tmp/x.py:3'}))
    assert '/tmp/x.py:3' in line and 'a b.jpg' in line and '\n' not in line


def test_summary_counts_by_phase_and_head():
    summary = Summary()
    for iteration in (3, 9):
        summary.add(incident(iteration))
    text = summary.text()
    row = next(line for line in text.splitlines() if 'bbox_head' in line)
    assert [cell.strip() for cell in row.strip('│ ').split('│')] == [
        'loss', 'roi_head.bbox_head', '2', '3', '9']
