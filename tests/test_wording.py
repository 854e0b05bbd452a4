
from test_records import incident

from mmdet_nanfix.wording import one_line


def test_summary_is_one_line_that_names_the_heads():
    line = one_line(incident().to_dict())
    assert '\n' not in line
    assert 'iter 7 (epoch 2)' in line and '512 -> 256' in line
    assert ('rpn_head: fine, roi_head.bbox_head: loss_cls nan, 1 of 8 '
            'parameters with bad gradients') in line
    assert 'backbone' not in line
    assert '1 in a row, 3 in all' in line
