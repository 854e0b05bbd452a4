"""A learning rate so high that weights are infinite after one step."""
family = 'yolov3'
precision = 'float32'
optimizer = dict(type='SGD', lr=1e38)
fault = dict(kind='config', values={})
expect = dict(
    phase='step', image=None, cause='NF108', action='skipped')
