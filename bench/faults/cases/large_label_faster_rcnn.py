"""A label beyond the classes: the device-side assert of NLL."""
family = 'faster_rcnn'
fault = dict(kind='label', sample=1, index=2, label=90)
expect = dict(
    phase='loss', head='roi_head.bbox_head', op='cross_entropy',
    file='cross_entropy_loss.py', line='F.cross_entropy(',
    image=1, annotation=2, cause='NF106', action='skipped')
