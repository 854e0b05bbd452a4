"""A checkpoint whose running variance is NaN, used as norm_eval does."""
family = 'faster_rcnn'
fault = dict(kind='buffer', name='backbone.layer2.0.bn1.running_var',
             value=float('nan'), eval=True)
expect = dict(
    phase='buffers', head='backbone', image=None,
    cause='NF110', action='skipped')
