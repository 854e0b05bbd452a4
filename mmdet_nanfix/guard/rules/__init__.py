"""Decide by plain rules, which know no torch and are tested as tables.

==============  ===========================================================
``loss_scale``  backoff and growth of the loss scale
``stop_rule``   when so many steps were skipped that training stops
``promotions``  modules that stay in fp32, since that has saved steps
==============  ===========================================================
"""
from __future__ import annotations

from .loss_scale import LossScale, LossScaleSettings
from .promotions import Fp32Promotions
from .stop_rule import StopRule

__all__ = ['Fp32Promotions', 'LossScale', 'LossScaleSettings', 'StopRule']
