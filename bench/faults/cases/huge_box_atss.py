"""A box in the wrong units: its area overflows in full precision."""
family = 'atss'
fault = dict(kind='box', sample=1, index=0, box=[10., 10., 1e30, 1e30])
expect = dict(
    phase='loss', head='bbox_head', op='mul', file='bbox_overlaps.py',
    line=['area2 = ', 'enclose_area = '], image=1, annotation=0,
    cause='NF104', action='skipped')
