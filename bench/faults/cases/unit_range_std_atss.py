"""Mean and std of pixels from 0 to 1, once more divided, for 0 to 255."""
family = 'atss'
step = 1
fault = dict(kind='config', values={
    'data_preprocessor.mean': [0.485 / 255, 0.456 / 255, 0.406 / 255],
    'data_preprocessor.std': [0.229 / 255, 0.224 / 255, 0.225 / 255],
})
expect = dict(
    phase='forward', head='backbone', op='_to_copy', file='resnet.py',
    line='x = self.conv1(x)', image=None, cause='NF105', action='skipped')
