"""IoULoss without its eps: predictions that overlap nothing."""
family = 'retinanet'
precision = 'float32'
step = 1
fault = dict(kind='config', values={
    'bbox_head.reg_decoded_bbox': True,
    'bbox_head.loss_bbox': dict(type='IoULoss', eps=0., mode='log'),
})
expect = dict(
    phase='loss', head='bbox_head', op='log', file='iou_loss.py',
    line='loss = -ious.log()', image=None, cause='NF107', action='skipped')
