"""A feed-forward layer of the third decoder layer leaves half's range."""
family = 'detr'
fault = dict(kind='weight', name='decoder.layers.2.ffn.layers.0.0.weight',
             factor=1e6)
expect = dict(
    phase='forward', head='decoder', op=['linear', 'addmm'],
    file='wrappers.py', line='super().forward(', image=None,
    cause='NF102', action='rescued_fp32_head')
