"""Find where in the user's or the host's code an operation is called.

Read off the Python stack while the operation runs: heads of MMDetection are
called as plain methods, which module hooks do not see.
"""
from __future__ import annotations

import inspect
import itertools
import re
import sys
import threading
import traceback
import types
from typing import Any, Callable, Iterable, Iterator, Tuple

import torch
from torch import Tensor, nn

from ...fp32 import loss_modules
from ...torch_support import HAS_SEQUENCE_NR
from .op_record import CallSite

__all__ = ['CallSites', 'NodeSites', 'is_library']

_OURS = __name__.partition('.')[0]
# Frames of these packages run on behalf of their caller. By the module that
# a function belongs to: packages are installed wherever a system likes.
_LIBRARIES = frozenset({'torch', 'numpy', 'scipy', _OURS})
# What computes losses and targets is called so in every head.
_LOSS_WORDS = ('loss', 'target', 'assign', 'cost', 'criterion')
_LAYER_WORDS = ('forward', 'predict')
_DEEPEST = 200
# What is outside of a replay does not count.
_REPLAYER = f'{__package__}.replayer'
# Its functions stand for the methods that they wrap.
_WRAPPERS = f'{_OURS}.fp32.'


def module_of(frame: types.FrameType) -> str:
    """Return the name of the Python module that a frame's code is in."""
    return str(frame.f_globals.get('__name__', ''))


def is_library(frame: types.FrameType) -> bool:
    """Tell if a frame is torch's, numpy's, scipy's or this package's."""
    return module_of(frame).partition('.')[0] in _LIBRARIES


class CallSites:
    """Finds the place that the current operation is called from.

    Args:
        model: Its modules are known by their paths.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name
                       for name, module in model.named_modules()}
        losses = {id(module) for module in loss_modules(model)}
        self._losses = {name for key, name in self._names.items()
                        if key in losses}
        self._kinds: dict[types.CodeType, tuple[bool, bool]] = {}

    def _kind(self, frame: types.FrameType) -> tuple[bool, bool]:
        """Tell if code is a library's, and if it may be a method."""
        code = frame.f_code
        known = self._kinds.get(code)
        if known is None:
            name = module_of(frame)
            known = (is_library(frame), code.co_argcount > 0
                     and code.co_varnames[0] == 'self'
                     and (name.startswith(_WRAPPERS)
                          or name.partition('.')[0] != _OURS))
            self._kinds[code] = known
        return known

    def here(self) -> CallSite:
        """The place that runs now; some ten microseconds."""
        return self._of(_outwards(sys._getframe(1)))

    def of_error(self, error: BaseException) -> CallSite:
        """The place that raised."""
        return self._of(reversed(list(
            traceback.walk_tb(error.__traceback__))))

    def _of(self, frames: Iterable[tuple[types.FrameType, int]]) -> CallSite:
        source = function = name = module = None
        in_loss: bool | None = None
        level = image = None
        inner: types.FrameType | None = None
        for frame, line in itertools.islice(frames, _DEEPEST):
            code = frame.f_code
            if module_of(frame) == _REPLAYER:
                break
            library, method = self._kind(frame)
            if source is None and not library:
                source = f'{code.co_filename}:{line or frame.f_lineno}'
                function, name = code.co_name, module_of(frame)
            owner = None
            if method and (module is None or in_loss is None):
                owner = self._names.get(id(_locals(frame, 'self')[0]))
                module = owner if module is None else module
            if in_loss is None and not library:
                in_loss = owner in self._losses or _means_loss(
                    code.co_name, owner is not None)
            if code.co_name == 'multi_apply' and inner is not None:
                level, image = _at(frame, inner, level, image)
            if not library and not code.co_name.startswith('<'):
                inner = frame
        return CallSite(source, function, name, module, bool(in_loss),
                        level, image)


def _locals(frame: types.FrameType, *names: str) -> list[Any]:
    """Return variables of a function that runs, None for what is not there.

    Up to Python 3.12 a frame keeps a copy of all its variables once it was
    asked for them: activations would live until the function returns. The
    copy is emptied, unless somebody else has it (``locals()``).
    """
    held: Any = frame.f_locals
    values = [held.get(name) for name in names]
    is_a_copy = type(held) is dict and (
        frame.f_code.co_flags & inspect.CO_NEWLOCALS)
    if is_a_copy and sys.getrefcount(held) == _HELD_BY_US:
        held.clear()
    return values


def _count() -> int:
    held: Any = sys._getframe().f_locals
    return sys.getrefcount(held)


# The frame's reference, ours, and that of the call that counts.
_HELD_BY_US = _count()


def _outwards(frame: types.FrameType | None
              ) -> Iterator[tuple[types.FrameType, int]]:
    """Frames and lines; 0 for the line that a frame is at."""
    while frame is not None:
        yield frame, 0
        frame = frame.f_back


def _means_loss(name: str, of_module: bool) -> bool | None:
    """What a function's name tells; None for nothing."""
    if of_module and any(word in name for word in _LAYER_WORDS):
        return False
    return True if any(word in name for word in _LOSS_WORDS) else None


def _at(loop: types.FrameType, inner: types.FrameType,
        level: int | None, image: int | None
        ) -> tuple[int | None, int | None]:
    """At which level or image a loop over both kinds of things is.

    MMDetection's ``multi_apply`` calls a function with the first of each of
    its lists, then with the second. Maps have four dimensions, what belongs
    to one image has fewer, or is no tensor.
    """
    lists = [item for item in _locals(loop, 'args')[0] or ()
             if isinstance(item, (list, tuple))]
    index = _index(lists, inner)
    if index is None:
        return level, image
    first = lists[0][index]
    of_level = isinstance(first, Tensor) and first.dim() == 4
    if of_level:
        return (index if level is None else level), image
    return level, (index if image is None else image)


def _index(lists: list[Any], inner: types.FrameType) -> int | None:
    """Which elements of the lists a call has among its arguments."""
    code = inner.f_code
    held = set(map(id, _locals(
        inner, *code.co_varnames[:code.co_argcount])))
    votes: dict[int, int] = {}
    for items in lists:
        at = [index for index, item in enumerate(items) if id(item) in held
              and not isinstance(item, (int, float, str, type(None)))]
        # The same object for each says nothing.
        if len(at) == 1:
            votes[at[0]] = votes.get(at[0], 0) + 1
    return max(votes, key=lambda index: votes[index]) if votes else None


#: Name of an operation, and where it was called from.
Named = Tuple[str, CallSite]


class NodeSites:
    """Remembers where the forward operations of autograd nodes are.

    A node has the number of its operation in the thread that ran it: a
    backward on a GPU, and what it computes again for a checkpoint, run in
    threads of their own, which count from 0 as well. (Torch 2.0 does not
    tell the number: there a node is known by itself.)
    """

    def __init__(self) -> None:
        self._numbered: dict[int, dict[Any, Named]] = {}
        self._nodes: dict[Any, Named] = {}
        # Another object in each thread; its identifier may be used again.
        self._thread = threading.local()

    def note_last(self, name: str, here: Callable[[], CallSite]) -> None:
        """Take in the operation that ran now, if it is the first to.

        The number is the last that was given out; what runs below the
        operation, or without a graph, comes later.
        """
        thread = self._thread.__dict__.setdefault('token', object())
        known = self._numbered.setdefault(
            torch._C._autograd._get_sequence_nr() - 1, {})
        if thread not in known:
            known[thread] = name, here()

    def note(self, node: Any, place: Named) -> None:
        """Take in a node that does not tell its number, if it is new."""
        self._nodes.setdefault(node, place)

    def knows(self, node: Any) -> bool:
        """Tell if a node was taken in by itself."""
        return node in self._nodes

    def find(self, node: Any, later: int = 0) -> Named | None:
        """Return the forward operation of a node.

        Args:
            node: The node.
            later: How many nodes have come between it and its operation.
        """
        if not HAS_SEQUENCE_NR:
            return self._nodes.get(node)
        known = list(self._numbered.get(
            node._sequence_nr() - later, {}).values())
        kind = re.sub(r'Backward\d*$', '', node.name()).lower()
        # Of several threads, that whose operation the node is called after.
        alike = [place for place in known if len(known) == 1
                 or place[0].replace('_', '') == kind]
        return next(iter(alike or known), None)
