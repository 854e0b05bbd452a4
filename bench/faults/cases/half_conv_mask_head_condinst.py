"""The features of the masks leave half's range before a BatchNorm."""
family = 'condinst'
fault = dict(
    kind='weight', factor=1e6,
    name='mask_head.mask_feature_head.conv_branch.1.conv.weight')
expect = dict(
    phase='forward', head='mask_head.mask_feature_head',
    op=['conv2d', 'convolution'], file='conv_module.py',
    line='x = self.conv(x)', image=None,
    cause='NF102', action='rescued_fp32_head')
