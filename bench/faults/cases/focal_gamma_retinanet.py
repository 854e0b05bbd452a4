"""Focal loss with gamma below one: the slope of its power at zero."""
family = 'retinanet'
precision = 'float32'
config = {'bbox_head.loss_cls.gamma': 0.5}
fault = dict(kind='weight', name='bbox_head.retina_cls.bias', value=-200.)
expect = dict(
    phase='backward', head='bbox_head', op='pow', file='focal_loss.py',
    line='pt.pow(gamma)', image=None, cause='NF107', action='skipped')
