"""The grid head leaves half's range in the second batch of a window."""
family = 'grid_rcnn'
accumulate = 2
fault = dict(kind='weight', name='roi_head.grid_head.convs.0.conv.weight',
             factor=6e5)
expect = dict(
    phase='forward', head='roi_head.grid_head', op=['conv2d', 'convolution'],
    file='conv_module.py', line='x = self.conv(x)', image=None,
    cause='NF102', action='skipped')
