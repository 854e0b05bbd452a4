"""A label beyond the classes where it becomes a one-hot vector."""
family = 'yolox'
fault = dict(kind='label', sample=0, index=1, label=80)
expect = dict(
    phase='loss', head='bbox_head', op=['assign', 'one_hot'],
    file='sim_ota_assigner.py', line='F.one_hot(', image=0, annotation=1,
    cause='NF106', action='skipped')
