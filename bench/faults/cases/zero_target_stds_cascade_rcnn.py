"""A box coder that divides targets by standard deviations of zero."""
family = 'cascade_rcnn'
step = 1
fault = dict(kind='config', values={
    'roi_head.bbox_head.1.bbox_coder.target_stds': [0., 0., 0., 0.]})
expect = dict(
    phase='loss', head='roi_head.bbox_head.1', op='div_',
    file='delta_xywh_bbox_coder.py',
    line='deltas = deltas.sub_(means).div_(stds)', image=None,
    cause='NF107', action='skipped')
