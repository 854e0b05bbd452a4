"""A diverged regression branch, whose exponential overflows in fp32."""
family = 'fcos'
config = {'bbox_head.loss_bbox.type': 'GIoULoss'}
fault = dict(kind='weight', name='bbox_head.conv_reg.bias', value=100.)
expect = dict(
    phase='forward', head='bbox_head', op='exp', file='fcos_head.py',
    line='bbox_pred = bbox_pred.exp()', image=None,
    cause='NF107', action='skipped')
