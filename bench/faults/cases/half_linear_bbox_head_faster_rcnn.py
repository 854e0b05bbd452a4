"""The first linear layer of the box head leaves half's range."""
family = 'faster_rcnn'
fault = dict(kind='weight', name='roi_head.bbox_head.shared_fcs.0.weight',
             factor=1e6)
expect = dict(
    phase='forward', head='roi_head.bbox_head', op=['linear', 'addmm'],
    file='convfc_bbox_head.py', line='x = self.relu(fc(x))', image=None,
    cause='NF102', action='skipped')
