"""Each lateral of the neck fits half, their top-down sum does not."""
family = 'retinanet'
fault = dict(
    kind='weight', value=4e4,
    name=['neck.lateral_convs.0.conv.bias', 'neck.lateral_convs.1.conv.bias'])
expect = dict(
    phase='forward', head='neck', op='_to_copy', file='conv_module.py',
    line='x = self.conv(x)', image=None, cause='NF102', action='skipped')
