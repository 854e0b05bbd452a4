"""A batch of one image, which is not to blame: the last layer overflows."""
family = 'solo'
samples = 1
fault = dict(kind='weight', name='mask_head.conv_cls.weight', factor=1e6)
expect = dict(
    phase='forward', head='mask_head', op=['conv2d', 'convolution'],
    file='solo_head.py', line='cls_pred = self.conv_cls(cls_feat)',
    image=None, cause='NF102', action='skipped')
