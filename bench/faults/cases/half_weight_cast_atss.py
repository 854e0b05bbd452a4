"""A weight beyond half's range is infinite as soon as it is rounded."""
family = 'atss'
fault = dict(kind='weight', name='bbox_head.atss_cls.weight',
             at=[3, 3, 1, 1], value=1e5)
expect = dict(
    phase='forward', head='bbox_head', op='_to_copy', file='atss_head.py',
    line='cls_score = self.atss_cls(cls_feat)', image=None,
    cause='NF102', action='skipped')
