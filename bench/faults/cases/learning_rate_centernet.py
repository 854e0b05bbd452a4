"""A learning rate that leaves weights finite, but too large for half."""
family = 'centernet'
fault = dict(kind='optim', values=dict(lr=1e12))
expect = dict(
    phase='forward', head='backbone', op='_to_copy', file='resnet.py',
    line='x = self.conv1(x)', image=None)
