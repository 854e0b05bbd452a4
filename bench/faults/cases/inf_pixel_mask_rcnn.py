"""A pixel of a float image is infinite."""
family = 'mask_rcnn'
fault = dict(kind='pixels', sample=0, at=[2, 7, 90], value=float('inf'))
expect = dict(
    phase='input', head=None, image=0, cause='NF105', action='skipped')
