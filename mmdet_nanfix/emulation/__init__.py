"""Compute on a CPU as CUDA does in half precision.

Loaded where half precision trains on a CPU, and never where a GPU does.

===================  ======================================================
``autocast``         the region :func:`cuda_autocast`, and the registration
                     that it holds
``autocast_switch``  torch's autocast, with ``cuda`` meaning the CPU
``op_lists``         CUDA autocast's lists of operations, by name
``kernels``          these lists as kernels
``casting``          the casts in front of them, weights once a region;
                     which operation is being computed in several steps
``sampling``         RoIAlign and deformable attention in half
``focal_loss``       sigmoid focal loss with the CUDA kernel's faults
``mmcv_ops``         these in the place of mmcv's own
===================  ======================================================
"""
from __future__ import annotations

from .autocast import cuda_autocast, require
from .casting import computing

__all__ = ['computing', 'cuda_autocast', 'require']
