"""Corners in the wrong order: the log of a negative width."""
family = 'retinanet'
precision = 'bfloat16'
fault = dict(kind='box', sample=0, index=1, box=[60., 20., 20., 60.])
expect = dict(
    phase='loss', head='bbox_head', op='log', file='delta_xywh_bbox_coder.py',
    line='dw = torch.log(gw / pw)', image=0, annotation=1,
    cause='NF104', action='skipped')
