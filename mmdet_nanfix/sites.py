"""Where in the user's or the host's code an operation is called from.

Read off the Python stack while the operation runs: heads of MMDetection are
called as plain methods, which module hooks do not see.
"""
from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import traceback
import types
from typing import Any, Iterable, Iterator

from torch import Tensor, nn

from .fp32 import loss_modules

__all__ = ['Site', 'Sites', 'is_library']

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# Frames of these packages run on behalf of their caller.
_LIBRARIES = tuple(
    f'{os.sep}site-packages{os.sep}{name}{os.sep}'
    for name in ('torch', 'numpy', 'scipy')) + (f'{_PACKAGE}{os.sep}', )
# What computes losses and targets is called so in every head.
_LOSS_WORDS = ('loss', 'target', 'assign', 'cost', 'criterion')
_LAYER_WORDS = ('forward', 'predict')
_DEEPEST = 200
# What is outside of a replay does not count.
_BEGIN = os.path.join(_PACKAGE, 'replay.py')
# Its functions stand for the methods that they wrap.
_REGIONS = os.path.join(_PACKAGE, 'regions.py')


def is_library(path: str) -> bool:
    """Whether a file is torch's, numpy's, scipy's or this package's."""
    return any(part in path for part in _LIBRARIES)


@dataclasses.dataclass(frozen=True)
class Site:
    """One place in the code of a model.

    Attributes:
        source: ``file:line``, the innermost outside of torch; None where
            there is none.
        function: Name of the function of that line.
        module: Path of the innermost module whose method runs; ``''`` is
            the model itself, None no module at all.
        in_loss: Whether losses, targets or costs are computed here, and not
            the forward of layers.
        level: Index of the feature level that a loop over levels is at.
        image: Index of the image that a loop over images is at.
    """

    source: str | None = None
    function: str | None = None
    module: str | None = None
    in_loss: bool = False
    level: int | None = None
    image: int | None = None


class Sites:
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

    def _kind(self, code: types.CodeType) -> tuple[bool, bool]:
        """Whether it is a library's, and whether it may be a method."""
        known = self._kinds.get(code)
        if known is None:
            path = code.co_filename
            known = (is_library(path), code.co_argcount > 0
                     and code.co_varnames[0] == 'self'
                     and (path == _REGIONS
                          or not path.startswith(_PACKAGE)))
            self._kinds[code] = known
        return known

    def here(self) -> Site:
        """The place that runs now; some ten microseconds."""
        return self._of(_outwards(sys._getframe(1)))

    def of_error(self, error: BaseException) -> Site:
        """The place that raised."""
        return self._of(reversed(list(
            traceback.walk_tb(error.__traceback__))))

    def _of(self, frames: Iterable[tuple[types.FrameType, int]]) -> Site:
        source = function = module = None
        in_loss: bool | None = None
        level = image = None
        inner: types.FrameType | None = None
        for frame, line in itertools.islice(frames, _DEEPEST):
            code = frame.f_code
            if code.co_filename == _BEGIN:
                break
            library, method = self._kind(code)
            if source is None and not library:
                source = f'{code.co_filename}:{line or frame.f_lineno}'
                function = code.co_name
            owner = None
            if method and (module is None or in_loss is None):
                owner = self._names.get(id(frame.f_locals.get('self')))
                module = owner if module is None else module
            if in_loss is None and not library:
                in_loss = owner in self._losses or _means_loss(
                    code.co_name, owner is not None)
            if code.co_name == 'multi_apply' and inner is not None:
                level, image = _at(frame, inner, level, image)
            if not library and not code.co_name.startswith('<'):
                inner = frame
        return Site(source, function, module, bool(in_loss), level, image)


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
    lists = [item for item in loop.f_locals.get('args', ())
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
    held = {id(inner.f_locals.get(name))
            for name in code.co_varnames[:code.co_argcount]}
    votes: dict[int, int] = {}
    for items in lists:
        at = [index for index, item in enumerate(items) if id(item) in held
              and not isinstance(item, (int, float, str, type(None)))]
        # The same object for each says nothing.
        if len(at) == 1:
            votes[at[0]] = votes.get(at[0], 0) + 1
    return max(votes, key=lambda index: votes[index]) if votes else None
