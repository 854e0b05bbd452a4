"""One layer's activations leave half's range, the branch's output does not."""
family = 'retinanet'
# Powers of two: in fp32 the branch computes what it did, to the last bit.
fault = dict(kind='weights', factors={
    'bbox_head.cls_convs.0.conv.weight': 2.**18,
    'bbox_head.cls_convs.0.conv.bias': 2.**18,
    'bbox_head.cls_convs.1.conv.weight': 2.**-6,
    'bbox_head.cls_convs.1.conv.bias': 2.**12,
    'bbox_head.cls_convs.2.conv.weight': 2.**-6,
    'bbox_head.cls_convs.2.conv.bias': 2.**6,
    'bbox_head.cls_convs.3.conv.weight': 2.**-6,
})
expect = dict(
    phase='forward', head='bbox_head', op=['conv2d', 'convolution'],
    file='conv_module.py', line='x = self.conv(x)', image=None,
    cause='NF102', action=('rescued_fp32_head', 'skipped'))
