"""The learned scale of one level has run away: a half product overflows."""
family = 'gfl'
fault = dict(kind='weight', name='bbox_head.scales.1.scale', value=1e30)
expect = dict(
    phase='forward', head='bbox_head', op='mul', file='scale.py',
    line='x * self.scale', image=None, cause='NF102', action='skipped')
