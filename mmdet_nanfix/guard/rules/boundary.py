"""Let an error of our own cost an explanation, and never the run."""
from __future__ import annotations

import contextlib
from typing import Any

__all__ = ['ErrorBoundary', 'in_words']


def in_words(error: BaseException, most: int = 200) -> str:
    """Type and text of an exception, on one line of so many characters."""
    text = ' '.join(str(error).split())
    return f'{type(error).__name__}: {text}'[:most]


class ErrorBoundary(contextlib.AbstractContextManager):
    """Region in which an error costs the explanation, and no more.

    Attributes:
        error: What was raised within, in words, or None.
    """

    error: str | None = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        # A batch that cannot be copied, an optimizer of an unknown kind:
        # that must not end the training, nor leave other processes waiting.
        if not isinstance(error, Exception):
            return False
        self.error = in_words(error)
        return True
