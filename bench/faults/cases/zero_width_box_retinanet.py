"""A box without width: its log is taken for the regression target."""
family = 'retinanet'
fault = dict(kind='box', sample=1, index=0, box=[20., 20., 20., 60.])
expect = dict(
    phase='loss', head='bbox_head', op='log', file='delta_xywh_bbox_coder.py',
    line='dw = torch.log(gw / pw)', image=1, annotation=0,
    cause='NF104', action='skipped')
