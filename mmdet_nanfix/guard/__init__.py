"""Guard an optimizer step as a transaction: detect, undo, decide, redo.

Complete without a diagnosis: it skips, rolls back, adapts the loss scale and
logs the heads. Calls go up through three Protocols only: ``Ranks`` (the
processes of a run), ``Trainer`` (a training loop) and ``Diagnosis``.

==============  ===========================================================
``step``        the guarded step: the whole story on one screen
``capture``     what a forward is given, returns and raises
``retry``       a failed step, made again with what has helped
``history``     losses, gradient norms and rates of the accepted steps
``protocols``   these three, and what is handed over
``standalone``  one process, a model trained by hand, no diagnosis
``checks``      finite checks, the anchor, inputs that are sanitized
``state``       what a step may change: remember and restore
``rules``       loss scale, stop rule, promotions to fp32: no torch
==============  ===========================================================
"""
from __future__ import annotations

from .protocols import (
    CapturedForward,
    CaughtException,
    Evidence,
    Explanation,
    MicroStep,
    Remedy,
    RetryResult,
    RunConfig,
)
from .standalone import PlainTrainer, StepParts
from .step import GuardedStep, Verdict

__all__ = [
    'CapturedForward', 'CaughtException', 'Evidence', 'Explanation',
    'GuardedStep', 'MicroStep', 'PlainTrainer', 'Remedy', 'RetryResult',
    'RunConfig', 'StepParts', 'Verdict'
]
