"""A batch of one image, and a label beyond the classes."""
family = 'grid_rcnn'
samples = 1
step = 1
fault = dict(kind='label', sample=0, index=1, label=85)
expect = dict(
    phase='loss', head='roi_head.bbox_head', op='cross_entropy',
    file='cross_entropy_loss.py', line='F.cross_entropy(',
    image=0, annotation=1, cause='NF106', action='skipped')
