"""The fifth decoder layer leaves half's range: its matching raises."""
family = 'mask2former'
fault = dict(
    kind='weight', factor=3e5, name='panoptic_head.transformer_decoder.'
    'layers.4.ffn.layers.0.0.weight')
expect = dict(
    phase='forward', head='panoptic_head', op=['linear', 'addmm'],
    file='wrappers.py', line='super().forward(', image=None,
    cause='NF102', action='rescued_fp32_head')
