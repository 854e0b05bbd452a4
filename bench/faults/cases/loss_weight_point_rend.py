"""The loss of the point head, which has the mask head's features before it."""
family = 'point_rend'
step = 1
fault = dict(kind='config',
             values={'roi_head.point_head.loss_point.loss_weight': 1e8})
expect = dict(
    phase='backward', head='roi_head.point_head', op='_to_copy',
    file='point_rend_roi_head.py',
    line='loss_and_target = self.point_head.loss_and_target(', image=None,
    cause='NF108', action='skipped')
