"""Name the causes of incidents by code."""
from __future__ import annotations

__all__ = ['TITLES']

#: Code and title of every cause; codes are never used again.
TITLES = {
    'NF101': 'loss scale too high',
    'NF102': 'half-precision overflow in a module',
    'NF103': 'loss, target or matching cost unsafe in half precision',
    'NF104': 'bad annotation',
    'NF105': 'bad pixels or input values',
    'NF106': 'label out of range',
    'NF107': 'not finite in full precision either',
    'NF108': 'diverging: learning rate, exploding gradients or loss term',
    'NF109': 'weights already non-finite',
    'NF110': 'buffers already non-finite',
    'NF111': 'optimizer state: eps, moments or half-precision weights',
    'NF112': 'not reproducible',
    'NF113': 'no origin found',
}
