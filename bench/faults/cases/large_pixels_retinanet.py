"""An image in other units: too large for half before the first layer."""
family = 'retinanet'
fault = dict(kind='pixels', sample=1, factor=1e6)
expect = dict(
    phase='forward', head='backbone', op='_to_copy', file='resnet.py',
    line='x = self.conv1(x)', image=1, cause='NF105', action='skipped')
