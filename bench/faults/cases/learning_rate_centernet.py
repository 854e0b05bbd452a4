"""A learning rate that leaves weights finite, but too large for half."""
family = 'centernet'
optimizer = dict(type='SGD', lr=1e12)
fault = dict(kind='config', values={})
expect = dict(
    phase='forward', head='backbone', op='_to_copy', file='resnet.py',
    line='x = self.conv1(x)', image=None, cause='NF108', action='skipped')
