"""An `.npz` of more images than memory holds: streamed once into a cache, and read a part at a time."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from distillkit.data._cache import BLOCK, Unfinished, as_bytes, listing_key, open_cache
from distillkit.data.readers.folder import Size
from distillkit.data.readers.npz import classes_of, damage_named, images_of, labels_of, opened_npz, parts_in
from distillkit.data.split import sides, to_pixels
from distillkit.data.stored_folder import StoredSplit, stored
from distillkit.normalization import Normalization

__all__ = ["open_npz"]


def open_npz(
    path: str | os.PathLike[str],
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    classes: tuple[str, ...] | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open an `.npz` of more, or larger, images than memory holds as floats: `load_npz`, but read when needed.

    For MedMNIST's sets of 224 pixels, say. The arrays are streamed once out of the file, which is compressed, into a
    cache; a later call finds it, as that of `open_folder`. A killed call begins again.

    Args:
        path, size, channels, normalization, classes: see `load_npz`.
        cache, progress: see `open_folder`.

    What is read is what `load_npz` gives, bit for bit if the arrays are uint8 and already have the size and channels
    wanted; otherwise every pixel within 1/510.

    Raises:
        FileNotFoundError, ValueError: see `load_npz`; also arrays in Fortran's order, which cannot be streamed.
        OSError, distillkit.locking.InUse: see `open_folder`.
    """
    path = Path(path).expanduser()
    with opened_npz(path) as file:
        labels_by_name = {key: file[key] for key in file.files if key.endswith("_labels")}
        keys = list(file.files)
    names = parts_in(path, keys)
    counts: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for part, name in names.items():
        with _array(path, name) as (_, shape, dtype):
            first = images_of(np.zeros((min(1, shape[0]), *shape[1:]), dtype), name)
        counts[part], shapes[part] = shape[0], tuple(to_pixels(first, size, channels).shape[1:])
        if shapes[part] != shapes["train"]:
            raise ValueError(
                f"{name}_images has pictures of {list(shapes[part])} (C, H, W), train_images of "
                f"{list(shapes['train'])}; give size= or channels="
            )
    c, h, w = shapes["train"]
    labels = {part: labels_of(labels_by_name[f"{n}_labels"], n, counts[part]) for part, n in names.items()}
    classes, given = classes_of(path, labels, classes)

    def fill(unfinished: Unfinished, done: Callable[[int], object]) -> None:
        begin = 0
        for name in names.values():
            with _array(path, name) as (stream, shape, dtype):
                for block in _blocks(path, stream, shape, dtype):
                    pictures = as_bytes(to_pixels(images_of(block, name), size, channels))
                    unfinished.write(begin, list(pictures))
                    begin += len(pictures)
                    done(len(pictures))

    key = listing_key([(path.name, path.stat())])
    total, asked = sum(counts.values()), f"{sides(size)} {channels}"
    opened = open_cache(path, key, total, (c, h, w), fill, asked=asked, folder=cache, progress=progress)
    rows = dict(zip(counts, torch.arange(total).split(list(counts.values()))))
    return stored(opened, rows, labels, classes, normalization, {"dataset": path.stem}, classes_given=given)


@contextmanager
def _array(path: Path, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], Any]]:
    """The bytes of one part's images as a stream, and their shape and dtype."""
    with ExitStack() as stack:
        with damage_named(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            stream = stack.enter_context(archive.open(f"{name}_images.npy"))
            version = np.lib.format.read_magic(stream)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = header(stream)
        if fortran:
            raise ValueError(
                f"{name}_images of {path} is in Fortran's order and cannot be streamed; save "
                "numpy.ascontiguousarray(images)"
            )
        yield stream, shape, dtype


def _blocks(path: Path, stream: IO[bytes], shape: tuple[int, ...], dtype: Any) -> Iterator[np.ndarray[Any, Any]]:
    each = dtype.itemsize * math.prod(shape[1:])
    for begin in range(0, shape[0], BLOCK):
        count = min(BLOCK, shape[0] - begin)
        with damage_named(path):
            data = bytearray(stream.read(count * each))
            block = np.frombuffer(data, dtype).reshape(count, *shape[1:])
        yield block
