"""The teacher has a NaN: its scores become weights of the student's loss."""
family = 'soft_teacher'
step = 1
fault = dict(kind='weight', name='teacher.roi_head.bbox_head.fc_cls.weight',
             at=[80, 7], value=float('nan'))
expect = dict(
    phase='params', head='teacher.roi_head.bbox_head', image=None,
    cause='NF109', action='skipped')
