"""Activations whose variance overflows: losses and gradients are finite."""
family = 'retinanet'
precision = 'float32'
fault = dict(kind='weight', name='backbone.conv1.weight', factor=1e22)
expect = dict(
    phase='buffers', head='backbone', image=None,
    cause='NF107', action='skipped')
