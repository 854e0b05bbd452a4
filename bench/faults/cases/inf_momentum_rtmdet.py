"""SGD's momentum has become infinite."""
family = 'rtmdet'
step = 3
optimizer = dict(type='SGD', lr=1e-4, momentum=0.9)
fault = dict(kind='moments', name='bbox_head.rtm_cls.0.bias',
             moment='momentum_buffer', at=[3], value=float('inf'))
expect = dict(
    phase='step', head='bbox_head', image=None,
    cause='NF111', action='skipped')
