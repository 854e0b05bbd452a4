"""A loss scale that something has set far too high, for a whole window."""
family = 'yolov3'
accumulate = 2
step = 3
loss_scale = dict(init_scale=64., max_scale=2.**30)
fault = dict(kind='scale', value=2.**30)
expect = dict(
    phase='backward', head='bbox_head', op='_to_copy',
    file='base_dense_head.py', line='losses = self.loss_by_feat(',
    image=None, cause='NF101', action='retried')
