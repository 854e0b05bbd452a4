"""The second mask head leaves half's range, after the first one's loss."""
family = 'htc'
step = 1
config = {'train_cfg.rpn_proposal.max_per_img': 100,
          **{f'train_cfg.rcnn.{stage}.sampler.num': 16
             for stage in range(3)}}
fault = dict(kind='weight', name='roi_head.mask_head.1.convs.0.conv.weight',
             factor=3e5)
expect = dict(
    phase='forward', head='roi_head.mask_head.1', op=['conv2d', 'convolution'],
    file='conv_module.py', line='x = self.conv(x)', image=None,
    cause='NF102', action='skipped')
