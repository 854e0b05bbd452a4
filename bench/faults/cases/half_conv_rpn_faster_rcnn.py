"""Activations of the proposal head leave half's range."""
family = 'faster_rcnn'
fault = dict(kind='weight', name='rpn_head.rpn_conv.weight', factor=1e6)
expect = dict(
    phase='forward', head='rpn_head', op=['conv2d', 'convolution'],
    file='rpn_head.py', line='x = self.rpn_conv(x)', image=None,
    cause='NF102', action='skipped')
