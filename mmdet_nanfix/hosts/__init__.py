"""Plug into the hosts that are installed: the only code that imports one.

============  =============================================================
``mmengine``  MMEngine, with MMDetection 3.x and its siblings
============  =============================================================
"""
from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__all__ = ['find', 'register']


def register() -> None:
    """Register with the hosts that are installed."""
    if importlib.util.find_spec('mmengine') is not None:
        find('register')(importlib.util.find_spec('mmdet') is not None)


def find(name: str) -> Any:
    """Return a class or function of the host's adapter by its name."""
    return getattr(importlib.import_module(f'{__name__}.mmengine'), name)
