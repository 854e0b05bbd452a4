"""The same, guarded: ``custom_imports`` is the only difference."""
_base_ = ['shapes_fp16_512.py']

custom_imports = dict(imports=['mmdet_nanfix'], allow_failed_imports=False)
