"""The data preprocessor divides by a standard deviation of zero."""
family = 'fcos'
precision = 'float32'
step = 1
fault = dict(
    kind='config', values={'data_preprocessor.std': [0., 0., 0.]})
expect = dict(
    phase='input', head=None, image=None, cause='NF105', action='skipped')
