"""A NaN in a frozen layer, which no gradient tells of."""
family = 'gfl'
precision = 'float32'
fault = dict(kind='weight', name='backbone.conv1.weight', at=[5, 0, 3, 3],
             value=float('nan'), frozen=True)
expect = dict(
    phase='params', head='backbone', image=None,
    cause='NF109', action='skipped')
