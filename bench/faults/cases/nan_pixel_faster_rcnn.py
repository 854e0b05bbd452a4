"""One pixel of a damaged image is NaN."""
family = 'faster_rcnn'
fault = dict(kind='pixels', sample=1, at=[0, 40, 40], value=float('nan'))
expect = dict(
    phase='input', head=None, image=1, cause='NF105', action='skipped')
