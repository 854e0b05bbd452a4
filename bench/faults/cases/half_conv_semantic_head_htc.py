"""The semantic head leaves half's range, and all that it is fused into."""
family = 'htc'
step = 1
config = {'train_cfg.rpn_proposal.max_per_img': 100,
          **{f'train_cfg.rcnn.{stage}.sampler.num': 16
             for stage in range(3)}}
fault = dict(kind='weight', name='roi_head.semantic_head.convs.2.conv.weight',
             factor=4e5)
expect = dict(
    phase='forward', head='roi_head.semantic_head',
    op=['conv2d', 'convolution'], file='conv_module.py',
    line='x = self.conv(x)', image=None, cause='NF102', action='skipped')
