"""A box that was divided by a width of zero; matching raises."""
family = 'detr'
fault = dict(
    kind='box', sample=0, index=0, box=[10., 10., float('inf'), 60.])
expect = dict(
    phase='input', head=None, image=0, annotation=0,
    cause='NF104', action='skipped')
