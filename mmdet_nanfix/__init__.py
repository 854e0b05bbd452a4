"""Half-precision MMDetection training that survives non-finite numbers.

Importing the package is all that a config needs
(``custom_imports = dict(imports=['mmdet_nanfix'])``): it loads the adapter
of the installed host. With ``MMDET_NANFIX=off`` in the environment names are
registered and nothing is replaced.

Imports go down only (a test proves it):

=================  ========================================================
``hosts``          the only code that imports a host
``report``         ``python -m mmdet_nanfix.report``: incidents as a table
``diagnosis``      a failed step replayed: where, which image, why, what
                   helps
``guard``          one optimizer step as a transaction: detect, undo,
                   decide, redo
``fp32``           full precision inside of autocast
``emulation``      CUDA's half precision on a CPU
``incidents``      what happened: record, codes, log, words
``torch_support``  what several packages need of torch
``losses``         the name that pickled ``Fp32*`` classes have
=================  ========================================================
"""
from __future__ import annotations

import importlib
import sys
from typing import Any

from .incidents import NonFiniteError

__all__ = ['NonFiniteError', '__version__']

# Found as attributes too, for types in configs that name them in full; with
# a host only.
_BY_NAME = ('NanGuardHook', 'NanSafeAmpOptimWrapper', 'NanSafeOptimWrapper')

__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
    if name in _BY_NAME:
        return importlib.import_module(f'{__name__}.hosts').find(name)
    if name in ('emulation', 'losses'):
        return importlib.import_module(f'{__name__}.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def _is_own_command() -> bool:
    """Whether Python was started as ``python -m mmdet_nanfix.<tool>``.

    Tools read files; loading torch and mmdet would cost them seconds.
    """
    argv = getattr(sys, 'orig_argv', None)
    if argv is None:
        # Before Python 3.10.
        try:
            with open('/proc/self/cmdline') as file:
                argv = file.read().split('\0')
        except OSError:
            argv = []
    return any(flag == '-m' and name.startswith(f'{__name__}.')
               for flag, name in zip(argv, argv[1:]))


if not _is_own_command():
    from . import hosts as _hosts
    _hosts.register()
