"""A box in the wrong units: the matching cost is NaN and matching raises."""
family = 'detr'
precision = 'float32'
fault = dict(kind='box', sample=1, index=0, box=[10., 10., 1e30, 1e30])
expect = dict(
    phase='loss', head='bbox_head', op='mul', file='bbox_overlaps.py',
    line=['area2 = ', 'enclose_area = '], image=1, annotation=0,
    cause='NF104', action='skipped')
