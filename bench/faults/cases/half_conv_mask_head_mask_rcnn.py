"""The mask head leaves half's range."""
family = 'mask_rcnn'
fault = dict(kind='weight', name='roi_head.mask_head.convs.0.conv.weight',
             factor=3e5)
expect = dict(
    phase='forward', head='roi_head.mask_head', op=['conv2d', 'convolution'],
    file='conv_module.py', line='x = self.conv(x)', image=None,
    cause='NF102', action='skipped')
