"""Boxes are blamed, the box branch is guilty: matching raises on its NaN."""
family = 'detr'
fault = dict(kind='weight', name='bbox_head.reg_ffn.layers.0.0.weight',
             factor=1e6)
expect = dict(
    phase='forward', head='bbox_head', op=['linear', 'addmm'],
    file='wrappers.py', line='super().forward(', image=None,
    cause='NF102', action=('rescued_fp32_head', 'skipped'))
