"""Kernels that the box head predicts are finite, what they give is not."""
family = 'condinst'
fault = dict(kind='weight', name='bbox_head.controller.weight', factor=1e4)
expect = dict(
    phase='forward', head='mask_head', op=['conv2d', 'convolution'],
    file='condinst_head.py', line='x = F.conv2d(x, w, bias=b', image=None,
    cause='NF102', action=('rescued_fp32_head', 'skipped'))
