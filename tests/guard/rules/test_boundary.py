from __future__ import annotations

import pytest

from mmdet_nanfix.guard.rules import ErrorBoundary, in_words


def test_an_error_costs_the_explanation_and_no_more():
    with ErrorBoundary() as boundary:
        raise KeyError('betas')
    assert boundary.error == "KeyError: 'betas'"
    with ErrorBoundary() as boundary:
        pass
    assert boundary.error is None
    # Who wants to stop stops.
    with pytest.raises(KeyboardInterrupt), ErrorBoundary():
        raise KeyboardInterrupt


def test_an_exception_is_one_line():
    assert in_words(ValueError('a\n  b')) == 'ValueError: a b'
    assert len(in_words(ValueError('a' * 999))) == 200
