"""Parameters that a proposal predicts are finite, their product is not."""
family = 'sparse_rcnn'
config = {'rpn_head.num_proposals': 20}
fault = dict(
    kind='weight', factor=1e4, name='roi_head.bbox_head.4.'
    'instance_interactive_conv.dynamic_layer.weight')
expect = dict(
    phase='forward', head='roi_head.bbox_head.4', op='bmm', file='utils.py',
    line='features = torch.bmm(', image=None,
    cause='NF102', action='rescued_fp32_head')
