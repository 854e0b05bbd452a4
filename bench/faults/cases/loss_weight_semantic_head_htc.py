"""The semantic loss is weighted so that its scaled gradients overflow."""
family = 'htc'
step = 1
config = {'train_cfg.rpn_proposal.max_per_img': 100,
          **{f'train_cfg.rcnn.{stage}.sampler.num': 16
             for stage in range(3)}}
fault = dict(kind='config',
             values={'roi_head.semantic_head.loss_seg.loss_weight': 1e8})
expect = dict(
    phase='backward', head='roi_head.semantic_head', op='_to_copy',
    file='htc_roi_head.py', line='loss_seg = self.semantic_head.loss(',
    image=None, cause='NF108', action='skipped')
