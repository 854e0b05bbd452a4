"""A diverged size branch: the exponential of its output overflows in fp32."""
family = 'yolox'
config = {'bbox_head.loss_bbox': dict(
    _delete_=True, type='GIoULoss', reduction='sum')}
fault = dict(kind='weight', at=[2], value=200., name=[
    'bbox_head.multi_level_conv_reg.0.bias',
    'bbox_head.multi_level_conv_reg.1.bias',
    'bbox_head.multi_level_conv_reg.2.bias'])
expect = dict(
    phase='loss', head='bbox_head', op='exp', file='yolox_head.py',
    line='whs = ', image=None, cause='NF107', action='skipped')
