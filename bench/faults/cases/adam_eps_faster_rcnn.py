"""Adam without its eps divides zero by zero where there is no gradient."""
family = 'faster_rcnn'
precision = 'float32'
step = 2
optimizer = dict(type='Adam', lr=1e-4, eps=0.)
fault = dict(kind='config', values={})
expect = dict(
    phase='step', image=None, cause='NF111', action='skipped')
