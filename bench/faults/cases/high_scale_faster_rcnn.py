"""A loss scale far too high, which nothing has lowered yet."""
family = 'faster_rcnn'
loss_scale = 'dynamic'
step = 1
fault = dict(kind='settings', values=dict(
    init_scale=2.**30, max_scale=2.**30, allow_high_start=True))
expect = dict(
    phase='backward', head='roi_head.bbox_head', op='_to_copy',
    file='standard_roi_head.py', line='self.bbox_head.loss_and_target(',
    image=None, cause='NF101', action='skipped')
