"""View a batch by its images, and make other batches of it.

A batch is nested dicts, lists and tensors, as MMEngine collates it. Lists
and tensors with one entry an image are its *columns*; below one branch of a
multi-branch batch they belong together.
"""
from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, Iterable, Iterator, Sequence, Tuple

from torch import Tensor

from .annotations import BadAnnotation, bad_annotations, repaired

__all__ = ['BatchView', 'Image']

Group = Tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Image:
    """One image of a batch.

    Attributes:
        place: What tells it from the others: its file, else branch and row.
        img_path: Its file, or None.
        img_id: Of the dataset, or None.
    """

    place: Any
    img_path: str | None = None
    img_id: Any = None

    def to_image(self) -> dict[str, Any]:
        """As an entry of an incident's ``images``."""
        path = self.img_path
        if path is None and isinstance(self.place, tuple):
            *branch, row = self.place
            path = ''.join(f'{name}, ' for name in branch) + f'number {row}'
        return {'img_path': path, 'img_id': self.img_id, 'annotation': None}


def _columns(value: Any, path: Group = ()) -> Iterable[tuple[Group, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _columns(item, (*path, str(key)))
    elif isinstance(value, list) or isinstance(value, Tensor) and (
            value.dim() > 0):
        yield path, value


def _top(path: Group) -> str:
    return path[0] if path else ''


class BatchView:
    """The images of a batch.

    Args:
        batch: The batch; it is not changed.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._groups: dict[Group, dict[str, Any]] = collections.defaultdict(
            dict)
        for path, column in _columns(batch):
            self._groups[path[1:]][_top(path)] = column
        # A branch has rows of its own and None for those of others.
        self._rows: dict[Group, list[Image | None]] = {}
        for group, columns in self._groups.items():
            lengths = {len(column) for column in columns.values()}
            if len(lengths) == 1:
                self._rows[group] = [
                    self._image(group, row) for row in range(lengths.pop())]

    def _image(self, group: Group, row: int) -> Image | None:
        columns = self._groups[group].values()
        if all(column[row] is None for column in columns):
            return None
        for column in columns:
            sample = column[row] if isinstance(column, list) else None
            path = getattr(sample, 'img_path', None)
            if path is not None:
                return Image(path, str(path),
                             getattr(sample, 'img_id', None))
        return Image((*group, row))

    @property
    def images(self) -> list[Image]:
        """All of them, each once."""
        return list(dict.fromkeys(
            image for row in self._rows.values() for image in row
            if image is not None))

    def at(self, row: int) -> Image | None:
        """The image of a row, where there is one branch only."""
        if len(self._rows) != 1:
            return None
        (rows, ) = self._rows.values()
        return rows[row] if row < len(rows) else None

    @property
    def size(self) -> int | None:
        """Number of rows, where there is one branch only."""
        return len(next(iter(self._rows.values()))) if (
            len(self._rows) == 1) else None

    def pixels(self) -> list[tuple[Image, Tensor]]:
        """The input tensor of each image, where there is one."""
        return [(image, columns['inputs'][row])
                for group, columns in self._groups.items()
                for row, image in enumerate(self._rows.get(group, ()))
                if image is not None and 'inputs' in columns
                and isinstance(columns['inputs'][row], Tensor)]

    def given(self, tensors: Iterable[Tensor]
              ) -> Iterator[tuple[str, str, Tensor]]:
        """Yield kind and name of tensors of the batch.

        Args:
            tensors: All of the batch: pixels are ``input``, all others an
                ``annotation``.
        """
        names: dict[int, str] = {}
        for image, pixels in self.pixels():
            memory = pixels.untyped_storage()._cdata
            names[memory] = 'the batch' if memory in names else (
                image.to_image()['img_path'])
        for tensor in tensors:
            name = names.get(tensor.untyped_storage()._cdata)
            yield ('annotation', 'an annotation', tensor) if (
                name is None) else ('input', name, tensor)

    def samples(self) -> dict[Group, list[Any]]:
        """Data samples by branch."""
        return {group: columns['data_samples']
                for group, columns in self._groups.items()
                if isinstance(columns.get('data_samples'), list)}

    def bad_annotations(self, num_classes: int | None = None
                        ) -> list[tuple[Group, BadAnnotation]]:
        """What is wrong with annotations, the worst first."""
        found = [(group, bad) for group, samples in self.samples().items()
                 for bad in bad_annotations(samples, num_classes)]
        return sorted(found, key=lambda item: item[1].fault)

    def repaired(self, bad: Sequence[tuple[Group, BadAnnotation]]) -> Any:
        """A copy of the batch with something fine in each bad place."""
        batch = copy.deepcopy(self._batch)
        for group in {group for group, _ in bad}:
            samples = BatchView(batch).samples()[group]
            samples[:] = repaired(samples, [
                item for where, item in bad if where == group])
        return batch

    def with_pixels(self, images: Iterable[Image], low: float,
                    high: float) -> Any:
        """A copy of the batch with the pixels of some images clipped.

        Args:
            images: Which.
            low: The smallest; NaN becomes it.
            high: The largest.
        """
        wrong = set(images)
        batch = copy.deepcopy(self._batch)
        for image, pixels in BatchView(batch).pixels():
            if image in wrong:
                pixels.nan_to_num_(nan=low).clamp_(low, high)
        return batch

    def replacing(self, images: Iterable[Image],
                other: BatchView | None = None) -> Any | None:
        """A copy of the batch with good images in the place of some.

        As many images as before, so that rules of a batch (BatchNorm, even
        sizes) hold.

        Args:
            images: Those that go.
            other: A batch to take images from where all of a branch go.

        Returns:
            None where there is nothing to put in their place.
        """
        gone = set(images)
        batch = copy.deepcopy(self._batch)
        for path, column in list(_columns(batch)):
            group, rows = path[1:], self._rows.get(path[1:], [])
            wrong = [row for row, image in enumerate(rows) if image in gone]
            good = [row for row, image in enumerate(rows)
                    if image is not None and image not in gone]
            if not wrong:
                continue
            source: Any = column
            if not good:
                columns = other._groups.get(group, {}) if other else {}
                source = columns.get(_top(path), ())
                good = [row for row in range(len(source))
                        if source[row] is not None]
            for count, row in enumerate(wrong):
                if not good:
                    return None
                column[row] = copy.deepcopy(source[good[count % len(good)]])
        return batch
