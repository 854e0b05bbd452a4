"""The third stage leaves half's range: its matching raises on the NaN."""
family = 'sparse_rcnn'
config = {'rpn_head.num_proposals': 20}
fault = dict(kind='weight', name='roi_head.bbox_head.2.reg_fcs.0.weight',
             factor=5e5)
expect = dict(
    phase='forward', head='roi_head.bbox_head.2', op=['linear', 'addmm'],
    file='dii_head.py', line='reg_feat = reg_layer(reg_feat)', image=None,
    cause='NF102', action='rescued_fp32_head')
