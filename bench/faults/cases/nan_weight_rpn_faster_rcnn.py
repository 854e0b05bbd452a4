"""A checkpoint with a NaN in one layer of the proposal head."""
family = 'faster_rcnn'
step = 1
fault = dict(kind='weight', name='rpn_head.rpn_reg.weight', at=[3, 1, 0, 0],
             value=float('nan'))
expect = dict(
    phase='params', head='rpn_head', image=None,
    cause='NF109', action='skipped')
