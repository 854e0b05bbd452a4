"""A label of -1, which some tools write for crowds."""
family = 'cascade_rcnn'
fault = dict(kind='label', sample=1, index=0, label=-1)
expect = dict(
    phase='loss', head='roi_head.bbox_head.0', op='cross_entropy',
    file='cross_entropy_loss.py', line='F.cross_entropy(',
    image=1, annotation=0, cause='NF106', action='skipped')
