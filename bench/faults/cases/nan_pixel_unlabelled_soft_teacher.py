"""A NaN in an image without annotations, as the teacher sees it."""
family = 'soft_teacher'
fault = dict(kind='pixels', branch='unsup_teacher', sample=1, at=[0, 64, 64],
             value=float('nan'))
expect = dict(
    phase='input', head=None, image=1, cause='NF105', action='skipped')
