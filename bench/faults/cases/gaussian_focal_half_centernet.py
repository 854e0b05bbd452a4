"""Gaussian focal loss in half: its eps is zero, a sure score's log is not."""
family = 'centernet'
nanfix = dict(fp32=None)
fault = dict(kind='weight', name='bbox_head.heatmap_head.2.bias', value=20.)
expect = dict(
    phase='loss', head=['bbox_head', 'bbox_head.heatmap_head'],
    op='log', file='gaussian_focal_loss.py',
    line='.log()', image=None,
    cause='NF103', action=('rescued_fp32_head', 'skipped'))
