"""An image whose shape says nothing of it is valid: attention masks it all."""
family = 'detr'
precision = 'float32'
fault = dict(kind='meta', sample=1, values=dict(img_shape=(0, 0)))
expect = dict(
    phase='forward', head='encoder', op=['_softmax', 'softmax'],
    file='transformer.py', line='out = self.attn(', image=1,
    cause='NF107', action='skipped')
