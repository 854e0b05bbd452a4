"""One feature level of a head leaves half's range."""
family = 'yolov3'
fault = dict(kind='weight', name='bbox_head.convs_pred.1.weight', factor=1e6)
expect = dict(
    phase='forward', head='bbox_head',
    op=['conv2d', 'convolution'], file='yolo_head.py',
    line='pred_map = self.convs_pred[i](feat)', image=None,
    cause='NF102', action='skipped')
