"""A small COCO-format set of drawn shapes, the same on every machine.

``python bench/lib/shapes.py FOLDER`` writes ``train.json``, ``val.json`` and
their images in a second or two.
"""
from __future__ import annotations

import argparse
import json
import os
from typing import Any, Sequence

import cv2
import numpy as np

__all__ = ['CLASSES', 'write_shapes']

CLASSES = ('rectangle', 'ellipse', 'triangle')
SIZE = (192, 160)
SPLITS = {'train': 64, 'val': 16}


def _draw(image: np.ndarray, label: int, box: Sequence[int],
          color: tuple[int, ...]) -> None:
    x, y, width, height = box
    if label == 0:
        cv2.rectangle(image, (x, y), (x + width, y + height), color, -1)
    elif label == 1:
        cv2.ellipse(image, (x + width // 2, y + height // 2),
                    (width // 2, height // 2), 0, 0, 360, color, -1)
    else:
        corners = np.array([[x + width // 2, y], [x, y + height],
                            [x + width, y + height]])
        cv2.fillPoly(image, [corners], color)


def _image(rng: np.random.Generator
           ) -> tuple[np.ndarray, list[tuple[int, list[int]]]]:
    """One picture with a shape in two or three of its four quarters."""
    width, height = SIZE
    image = np.full((height, width, 3), rng.integers(90, 130, 3), np.uint8)
    shapes = []
    for quarter in rng.permutation(4)[:rng.integers(2, 4)]:
        left = width // 2 * int(quarter % 2)
        top = height // 2 * int(quarter // 2)
        w, h = (int(v) for v in rng.integers(36, 66, 2))
        x = left + int(rng.integers(4, width // 2 - w - 4))
        y = top + int(rng.integers(4, height // 2 - h - 4))
        label = int(rng.integers(len(CLASSES)))
        # One bright channel a class, so that a short training can tell.
        color = [40, 40, 40]
        color[label] = int(rng.integers(200, 256))
        _draw(image, label, (x, y, w, h), tuple(color))
        shapes.append((label, [x, y, w, h]))
    return image, shapes


def _split(folder: str, name: str, count: int,
           rng: np.random.Generator) -> None:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    os.makedirs(os.path.join(folder, name), exist_ok=True)
    for index in range(count):
        image, shapes = _image(rng)
        file_name = f'{index:03d}.png'
        cv2.imwrite(os.path.join(folder, name, file_name), image)
        images.append(dict(id=index, file_name=file_name, width=SIZE[0],
                           height=SIZE[1]))
        for label, box in shapes:
            annotations.append(dict(
                id=len(annotations) + 1, image_id=index, bbox=box,
                category_id=label + 1, area=box[2] * box[3], iscrowd=0))
    categories = [dict(id=i + 1, name=n) for i, n in enumerate(CLASSES)]
    with open(os.path.join(folder, f'{name}.json'), 'w') as file:
        json.dump(dict(images=images, annotations=annotations,
                       categories=categories), file)


def write_shapes(folder: str) -> None:
    """Write both splits below a folder, over what is there."""
    rng = np.random.default_rng(0)
    for name, count in SPLITS.items():
        _split(folder, name, count, rng)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('folder')
    write_shapes(parser.parse_args().folder)
