"""The loss of one head is weighted so that its scaled gradients overflow."""
family = 'faster_rcnn'
step = 1
fault = dict(kind='config', values={'rpn_head.loss_cls.loss_weight': 1e7})
expect = dict(
    phase='backward', head='rpn_head', op='_to_copy',
    file='base_dense_head.py', line='losses = self.loss_by_feat(',
    image=None, cause='NF108', action='skipped')
