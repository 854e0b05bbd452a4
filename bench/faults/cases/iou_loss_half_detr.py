"""The gradient of an IoU's log passes through half: one over a small IoU."""
family = 'detr'
nanfix = dict(fp32=None)
loss_scale = dict(init_scale=65536., allow_high_start=True)
step = 1
fault = dict(kind='config', values={'bbox_head.loss_iou.type': 'IoULoss'})
expect = dict(
    phase='backward', head='bbox_head', op=['_to_copy', 'log'],
    file='iou_loss.py', line='loss = -ious.log()', image=None,
    cause=['NF103', 'NF101'], action='skipped')
