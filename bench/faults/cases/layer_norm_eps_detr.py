"""Layer norm without its eps: the first decoder layer normalises zeros."""
family = 'detr'
precision = 'float32'
step = 1
fault = dict(kind='config', values={
    'decoder.layer_cfg.norm_cfg': dict(type='LN', eps=0.)})
expect = dict(
    phase='forward', head='decoder', op=['native_layer_norm', 'layer_norm'],
    file='detr_layers.py', line='query = self.norms[0](query)', image=None,
    cause='NF107', action='skipped')
