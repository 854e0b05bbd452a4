"""Adam's second moment has become NaN: the update makes a weight NaN."""
family = 'dynamic_rcnn'
step = 3
optimizer = dict(type='Adam', lr=1e-4)
fault = dict(kind='moments', name='roi_head.bbox_head.fc_reg.weight',
             moment='exp_avg_sq', at=[7, 3], value=float('nan'))
expect = dict(
    phase='step', head='roi_head.bbox_head', image=None,
    cause='NF111', action='skipped')
