"""The box head of the student leaves half's range, that of the teacher not."""
family = 'soft_teacher'
fault = dict(
    kind='weight', factor=1e6,
    name='student.roi_head.bbox_head.shared_fcs.0.weight')
expect = dict(
    phase='forward', head='student.roi_head.bbox_head',
    op=['linear', 'addmm'], file='convfc_bbox_head.py',
    line='x = self.relu(fc(x))', image=None, cause='NF102', action='skipped')
