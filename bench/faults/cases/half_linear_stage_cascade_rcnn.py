"""The second stage alone leaves half's range."""
family = 'cascade_rcnn'
fault = dict(kind='weight', name='roi_head.bbox_head.1.shared_fcs.0.weight',
             factor=1e6)
expect = dict(
    phase='forward', head='roi_head.bbox_head.1', op=['linear', 'addmm'],
    file='convfc_bbox_head.py', line='x = self.relu(fc(x))', image=None,
    cause='NF102', action='skipped')
