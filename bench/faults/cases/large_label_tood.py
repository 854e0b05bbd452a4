"""A label beyond the classes picks a score that is not there."""
family = 'tood'
config = {'train_cfg.initial_epoch': 0}
fault = dict(kind='label', sample=0, index=2, label=90)
expect = dict(
    phase='loss', head='bbox_head', op=['index', '__getitem__', 'getitem'],
    file='task_aligned_assigner.py',
    line='bbox_scores = pred_scores[:, gt_labels]', image=0, annotation=2,
    cause='NF106', action='skipped')
