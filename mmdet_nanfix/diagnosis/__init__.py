"""Explain a failed step: where it began, which image, why, what helps.

===================  ======================================================
``diagnose``         the conductor
``investigate``      one forward: where it began, what would help
``conclude``         findings turned into where, cause and remedy
``first_look``       what shows without a replay
``parts``            which part of a model owns a loss or a parameter
``context``          what the run was like
``counterfactuals``  what would have helped, tried by replays
``findings``         what replays have shown, in one place
``exceptions``       why a forward raised
``replay``           runs the step again, and looks
``cause``            symptoms, verdict, advice, remedy
===================  ======================================================
"""
from __future__ import annotations

from ..guard import StepParts
from .conclude import Conclusion
from .diagnose import Diagnostician
from .investigate import Investigator
from .parts import ModelParts

__all__ = ['diagnostician']


def diagnostician(step: StepParts, max_incidents: int | None = 100
                  ) -> Diagnostician:
    """Make the :class:`.Diagnosis` that replays failed steps.

    Args:
        step: Parts of the guarded step.
        max_incidents: After so many failed steps nothing is replayed; None
            for always, 0 for never.
    """
    parts = ModelParts(step.model)
    return Diagnostician(step, parts, Investigator(step, parts).investigate,
                         Conclusion(step, parts), max_incidents)
