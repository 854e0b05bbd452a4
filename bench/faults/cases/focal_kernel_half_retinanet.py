"""The focal loss kernel in half at a logit that its sigmoid rounds to one."""
family = 'retinanet'
nanfix = dict(fp32=None)
fault = dict(kind='weight', name='bbox_head.retina_cls.bias', value=9.)
expect = dict(
    phase='loss', head='bbox_head',
    op=['log', 'sigmoid_focal_loss', 'sigmoid_focal_loss_forward'],
    file='focal_loss.py', line='sigmoid_focal_loss', image=None,
    cause='NF103', action='skipped')
