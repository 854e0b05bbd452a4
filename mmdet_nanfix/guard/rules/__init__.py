"""Decide by plain rules, which know no torch and are tested as tables.

==============  ===========================================================
``loss_scale``  backoff and growth of the loss scale
``stop_rule``   when so many steps were skipped that training stops
``promotions``  modules that stay in fp32, since that has saved steps
``boundary``    an error of our own costs an explanation, and never the run
==============  ===========================================================
"""
from __future__ import annotations

from .boundary import ErrorBoundary, in_words
from .loss_scale import LossScale, LossScaleSettings
from .promotions import Fp32Promotions
from .stop_rule import StopRule

__all__ = [
    'ErrorBoundary', 'Fp32Promotions', 'LossScale', 'LossScaleSettings',
    'StopRule', 'in_words'
]
