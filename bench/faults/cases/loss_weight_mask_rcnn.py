"""The loss of the mask head is weighted so that its gradients overflow."""
family = 'mask_rcnn'
step = 1
fault = dict(
    kind='config', values={'roi_head.mask_head.loss_mask.loss_weight': 1e9})
expect = dict(
    phase='backward', head='roi_head.mask_head', op='_to_copy',
    file='standard_roi_head.py', line='self.mask_head.loss_and_target(',
    image=None, cause='NF108', action='skipped')
