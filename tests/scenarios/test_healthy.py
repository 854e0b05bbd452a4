"""``python bench/claims/healthy.py`` looks at all families, for longer."""
from __future__ import annotations

import pytest
from healthy import watch


@pytest.mark.parametrize('name', ['faster_rcnn', 'detr'])
def test_nothing_is_blamed_where_nothing_is_wrong(name):
    incidents, seen, reached = watch(name, steps=2, size=128)
    assert (incidents, reached) == (0, 0)
    # Attention masks are infinities, and are seen.
    assert name != 'detr' or seen
