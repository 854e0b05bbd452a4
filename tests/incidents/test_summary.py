from __future__ import annotations

from helpers.incidents import incident

from mmdet_nanfix.incidents import Summary


def test_summary_counts_by_phase_and_head():
    summary = Summary()
    for iteration in (3, 9):
        summary.add(incident(iteration))
    text = summary.text()
    row = next(line for line in text.splitlines() if 'bbox_head' in line)
    assert [cell.strip() for cell in row.strip('│ ').split('│')] == [
        'loss', 'roi_head.bbox_head', '2', '3', '9']
