"""Quality focal loss with beta below one: the slope of its power at zero."""
family = 'gfl'
config = {'bbox_head.loss_cls.beta': 0.5}
fault = dict(kind='weight', name='bbox_head.gfl_cls.bias', value=-200.)
expect = dict(
    phase='backward', head='bbox_head', op='pow', file='gfocal_loss.py',
    line='.pow(beta)', image=None, cause='NF107', action='skipped')
