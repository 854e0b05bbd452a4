from __future__ import annotations

import pytest

from mmdet_nanfix.fp32.wrapping import hold_regions


class Owner:
    """Stands for the control of a model's precision."""


@pytest.fixture(autouse=True)
def held():
    """Keep what a test wraps by itself until its end.

    Controls of other tests, which are freed at any time, would take it along.
    """
    owner = Owner()
    hold_regions(owner)
    yield
    del owner
