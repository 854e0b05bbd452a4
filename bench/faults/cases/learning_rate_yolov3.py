"""A learning rate so high that weights are infinite after one step."""
family = 'yolov3'
precision = 'float32'
fault = dict(kind='optim', values=dict(lr=1e38))
expect = dict(phase='step', image=None)
