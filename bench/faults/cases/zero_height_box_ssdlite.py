"""A box without height under smooth L1, whose gradient goes bad as well."""
family = 'ssdlite'
precision = 'float32'
fault = dict(kind='box', sample=1, index=2, box=[20., 40., 90., 40.])
expect = dict(
    phase='loss', head='bbox_head', op='log', file='delta_xywh_bbox_coder.py',
    line='dh = torch.log(gh / ph)', image=1, annotation=2,
    cause='NF104', action='skipped')
