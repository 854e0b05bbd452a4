"""The mask head's first layer leaves half's range, its masks are as before."""
family = 'mask_rcnn'
# Powers of two: in fp32 the head computes what it did, to the last bit.
fault = dict(kind='weights', factors={
    'roi_head.mask_head.convs.0.conv.weight': 2.**16,
    'roi_head.mask_head.convs.0.conv.bias': 2.**16,
    'roi_head.mask_head.convs.1.conv.weight': 2.**-4,
    'roi_head.mask_head.convs.1.conv.bias': 2.**12,
    'roi_head.mask_head.convs.2.conv.weight': 2.**-4,
    'roi_head.mask_head.convs.2.conv.bias': 2.**8,
    'roi_head.mask_head.convs.3.conv.weight': 2.**-4,
    'roi_head.mask_head.convs.3.conv.bias': 2.**4,
    'roi_head.mask_head.upsample.weight': 2.**-4,
})
expect = dict(
    phase='forward', head='roi_head.mask_head', op=['conv2d', 'convolution'],
    file='conv_module.py', line='x = self.conv(x)', image=None,
    cause='NF102', action=('rescued_fp32_head', 'skipped'))
