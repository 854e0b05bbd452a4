"""A box in the wrong units: its area overflows in full precision."""
family = 'vfnet'
fault = dict(kind='box', sample=0, index=2, box=[5., 5., 1e25, 1e25])
expect = dict(
    phase='loss', head='bbox_head', op='mul', file='bbox_overlaps.py',
    line=['area2 = ', 'enclose_area = '], image=0, annotation=2,
    cause='NF104', action='skipped')
