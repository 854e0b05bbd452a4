"""A NaN in the annotation file."""
family = 'yolox'
fault = dict(
    kind='box', sample=1, index=1, box=[20., 20., float('nan'), 60.])
expect = dict(
    phase='input', head=None, image=1, annotation=1,
    cause='NF104', action='skipped')
