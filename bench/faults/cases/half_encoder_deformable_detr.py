"""The residual stream of an encoder drifts out of half's range."""
family = 'deformable_detr'
fault = dict(kind='weight', name='encoder.layers.1.ffn.layers.1.weight',
             factor=9e5)
expect = dict(
    phase='forward', head='encoder', op=['linear', 'addmm'],
    file='wrappers.py', line='super().forward(', image=None,
    cause='NF102', action='rescued_fp32_head')
