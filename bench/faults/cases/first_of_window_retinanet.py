"""A box without width in the first batch of a window, the next one is fine."""
family = 'retinanet'
accumulate = 2
step = 3
fault = dict(kind='box', sample=1, index=2, box=[30., 8., 30., 70.])
expect = dict(
    phase='loss', head='bbox_head', op='log', file='delta_xywh_bbox_coder.py',
    line='dw = torch.log(gw / pw)', image=1, annotation=2,
    cause='NF104', action='skipped')
