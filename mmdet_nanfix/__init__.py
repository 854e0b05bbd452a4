"""Half-precision MMDetection training that survives non-finite numbers.

Importing the package is all that a config needs
(``custom_imports = dict(imports=['mmdet_nanfix'])``): it loads the adapter
of the installed host. With ``MMDET_NANFIX=off`` in the environment names are
registered and nothing is replaced.

Layers; imports go down only:

====================  ===================================================
hosts                 one host each
``hooks``             MMEngine's hooks, and the names that are replaced
``engine``            MMEngine's optimizer wrappers, guarded
``guarded``           what these have in common
``standin``           what stands for a wrapper while a step is made again
``journal``           what is told of a run, and where
``losses``            MMDetection's losses in fp32, under their own names
``mmcv_ops``          mmcv's compiled operations as CUDA computes them
tensors               torch
``step``              the guarded step: decide, keep the evidence
``remedies``          a failed step, made again with what helps
``inquiry``           what is found out about a failed step
``watch``             what a model is given and makes of it in one forward
``evidence``          what a failed step shows, and where it began
``locate``            makes the replays that a search asks for
``experiments``       counterfactual replays: what would have helped
``history``           the last accepted steps, in a few numbers
``search``            the search for operation, image and annotation
``replay``            a failing forward and its backward, once more
``provenance``        the probe: where non-finite numbers come from
``origins``           what is noted of an operation
``sites``             where in the code an operation is called from
``batches``           a batch as it was, and others made of it
``raisers``           functions that raise for non-finite numbers
``buffers``           which buffers must stay finite
``trial``             trials that tell why a forward raised
``annotations``       annotations that no loss can be computed from
``widening``          what is computed in fp32 right now
``host``              what replays and retries need of a training's runner
``config_places``     where in a config the modules of a model are
``model_kinds``       kinds of models that are guarded otherwise
``fp32_parts``        parts of a model that run in fp32 as a whole
``regions``           methods of a model that run in fp32
``head_methods``      which these are
``loss_formulas``     losses that are finite where the host's are not
``precision``         full precision inside of autocast
``transaction``       what a forward changes, and the way back
``picture``           what hangs below a model at one moment
``heads``             which part owns a loss, a parameter, a gradient
``finite``            finite checks, the anchor
``arguments``         arguments of an optimizer wrapper, checked
``cpu_scaler``        torch's gradient scaler, before torch has one for a CPU
``emulation``         half precision on a CPU with CUDA's numerics
``autocast_switch``   torch's autocast, with ``cuda`` meaning the CPU
``half_ops``          its lists of operations, as kernels
``op_lists``          these lists, by name
``half_sampling``     RoIAlign and deformable attention in half
``torch_support``     what not every version of torch offers
plain                 standard library (and rich, for tables)
``report``            the log as a table; ``python -m``
``wording``           incidents in words
``advice``            what helps, and a change of the config
``causes``            the verdict on what replays have shown
``sticky``            which parts stay in fp32
``records``           incidents and their log
``policy``            loss-scale and stop rules
====================  ===================================================
"""
from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from .incidents import NonFiniteError

__all__ = ['NonFiniteError', '__version__']

# Found as attributes too, for types in configs that name them in full; with
# a host only.
_BY_NAME = {
    'NanGuardHook': 'hooks',
    'NanSafeAmpOptimWrapper': 'engine',
    'NanSafeOptimWrapper': 'engine',
}

__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
    if name in _BY_NAME:
        module = importlib.import_module(f'{__name__}.{_BY_NAME[name]}')
        return getattr(module, name)
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


def _load_host() -> None:
    """Register with the hosts that are installed."""
    if importlib.util.find_spec('mmengine') is None:
        return
    from . import hooks

    on = not hooks.is_off()
    has_mmdet = importlib.util.find_spec('mmdet') is not None
    if has_mmdet:
        hooks.shadow_stock_names(guarded=on)
        from . import losses
        losses.register_losses()
    if on:
        hooks.allow_resume()


if not _is_own_command():
    _load_host()
