"""A loss scale that grows far too much after two good steps."""
family = 'retinanet'
step = 3
fault = dict(kind='settings', values=dict(
    growth_interval=2, growth_factor=2.**24, max_scale=2.**30))
expect = dict(
    phase='backward', head='bbox_head', op='_to_copy',
    file='base_dense_head.py', line='losses = self.loss_by_feat(',
    image=None, cause='NF101', action='retried')
