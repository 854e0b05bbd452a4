"""A running variance below zero: finite, but its root is not."""
family = 'retinanet'
precision = 'float32'
fault = dict(kind='buffer', name='backbone.layer2.0.bn1.running_var',
             value=-1., eval=True)
expect = dict(
    phase='forward', head='backbone', op=['native_batch_norm', 'batch_norm'],
    file='resnet.py', line='out = self.norm1(out)', image=None,
    cause='NF107', action='skipped')
