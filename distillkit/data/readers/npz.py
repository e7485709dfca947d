"""Reader of `.npz` files of arrays in MedMNIST's layout."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.pixels import AnyPath, Size, height_and_width, to_bytes, to_pixels
from distillkit.data._assembly import SplitBuilder
from distillkit.data._cache import BLOCK, CacheWriter, files_key, open_cache
from distillkit.data.split import Split, StoredSplit, warn_of_repeats
from distillkit.normalization import Normalization

_PARTS = {"train": "train", "test": "test", "val": "validation"}


def load_npz(
    path: AnyPath,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    classes: tuple[str, ...] | None = None,
) -> Split:
    """Load your own arrays from an `.npz` file in MedMNIST's layout.

    The file contains the arrays `train_images`, `train_labels`, `test_images`, `test_labels` and, optionally,
    `val_images` and `val_labels`.

    Args:
        path: the file. Images are [N, H, W] or [N, H, W, C] with 1 or 3 channels, either uint8 in 0..255 or float in
            [0, 1]. Labels are integers: class indices [N] or [N, 1], or multi-label rows [N, K] of 0 and 1, which are
            converted to float.
        size: height and width in pixels; see `load_folder`.
        channels: number of channels, 1 or 3; see `load_folder`.
        normalization: normalization of the sets. Default: mean and standard deviation measured on the training split.
        classes: the class names. Default: "0", "1", ... up to the largest label in the file. The sets then record that
            the number of classes was derived from the labels (see `LabeledImages`).

    Warnings report equal images with different labels, and images of `train` that are also in another part.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not an `.npz`, or an array is missing or has the wrong shape, type or range.
    """
    path = check.path(path, "path")
    with _open_archive(path) as file:
        arrays = _arrays(file, file.files)
    names = _part_names(path, list(arrays))
    pixels = {part: to_pixels(_as_images(arrays[f"{n}_images"], n), size, channels) for part, n in names.items()}
    labels = {part: _as_labels(arrays[f"{n}_labels"], n, len(pixels[part])) for part, n in names.items()}
    classes, given = _class_names(path, labels, classes)
    return warn_of_repeats(SplitBuilder(labels, classes, normalization, {"dataset": path.stem}, given).build(pixels))


def open_npz(
    path: AnyPath,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    classes: tuple[str, ...] | None = None,
    cache: AnyPath | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open an `.npz` file whose images do not fit in memory as floats, and read images only when needed.

    Use it like `load_npz`, for example for MedMNIST's sets of 224x224 images. The first call copies the compressed
    arrays into a cache, which later calls reuse, as in `open_folder`. If the first call is interrupted, the next call
    starts from the beginning.

    Args:
        path, size, channels, normalization, classes: as in `load_npz`.
        cache, progress: as in `open_folder`.

    The pixels equal those of `load_npz` for uint8 arrays that already have the requested size and channels. Other
    pixels differ by up to 1/510, because the cache rounds them to bytes.

    Raises:
        FileNotFoundError, ValueError: for the same reasons as in `load_npz`, and if an array is in Fortran order.
        OSError, distillkit.locking.InUse: the cache cannot be written; see `open_folder`.
    """
    path = check.path(path, "path")
    with _open_archive(path) as file:
        arrays = _arrays(file, [key for key in file.files if key.endswith("_labels")])
        names = _part_names(path, list(file.files))
    counts: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for part, name in names.items():
        with _stream(path, name) as (_, shape, dtype):
            first = _as_images(np.zeros((min(1, shape[0]), *shape[1:]), dtype), name)
        counts[part], shapes[part] = shape[0], tuple(to_pixels(first, size, channels).shape[1:])
        if shapes[part] != shapes["train"]:
            raise ValueError(
                f"{name}_images has pictures of {list(shapes[part])} (C, H, W), train_images of "
                f"{list(shapes['train'])}; give size= or channels="
            )
    c, h, w = shapes["train"]
    labels = {part: _as_labels(arrays[f"{n}_labels"], n, counts[part]) for part, n in names.items()}
    classes, given = _class_names(path, labels, classes)

    def fill(writer: CacheWriter, done: Callable[[int], object]) -> None:
        begin = 0
        for name in names.values():
            with _stream(path, name) as (stream, shape, dtype):
                for block in _blocks(path, stream, shape, dtype):
                    pictures = to_bytes(to_pixels(_as_images(block, name), size, channels))
                    writer.write(begin, list(pictures))
                    begin += len(pictures)
                    done(len(pictures))

    key = files_key([(path.name, path.stat())])
    total, options = sum(counts.values()), f"{height_and_width(size)} {channels}"
    opened = open_cache(path, key, total, (c, h, w), fill, options=options, folder=cache, progress=progress)
    rows = dict(zip(counts, torch.arange(total).split(list(counts.values()))))
    builder = SplitBuilder(labels, classes, normalization, {"dataset": path.stem}, given)
    return warn_of_repeats(builder.build_stored(opened, rows))


@contextmanager
def _open_archive(path: Path) -> Iterator[Any]:
    """Open an `.npz` file with NumPy for a `with` block, and yield the NumPy archive."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected an .npz with train_images, train_labels, test_images, ...")
    with _explain_damage(path), path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        yield file


def _arrays(file: Any, keys: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    found = {key: file[key] for key in keys}
    if wrong := [key for key, held in found.items() if not isinstance(held, np.ndarray)]:  # NumPy gives such as bytes
        raise ValueError(f"{wrong[0]} is no array")
    return found


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Convert errors from reading a damaged or unsuitable file in a `with` block to a ValueError that names `path`."""
    try:
        yield
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, TypeError, tokenize.TokenError) as error:
        raise ValueError(f"{path} is damaged or not an .npz of plain arrays: {error}") from error


@contextmanager
def _stream(path: Path, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], Any]]:
    """Yield the array `<name>_images` of an `.npz` file as a stream of bytes, and the array's shape and dtype."""
    with ExitStack() as stack:
        with _explain_damage(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            stream = stack.enter_context(archive.open(f"{name}_images.npy"))
            version = np.lib.format.read_magic(stream)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = header(stream)
        if fortran:
            raise ValueError(
                f"{name}_images of {path} is in Fortran order and cannot be streamed; save "
                "numpy.ascontiguousarray(images)"
            )
        yield stream, shape, dtype


def _blocks(path: Path, stream: IO[bytes], shape: tuple[int, ...], dtype: Any) -> Iterator[np.ndarray[Any, Any]]:
    each = dtype.itemsize * math.prod(shape[1:])
    for begin in range(0, shape[0], BLOCK):
        count = min(BLOCK, shape[0] - begin)
        with _explain_damage(path):
            data = bytearray(stream.read(count * each))
            block = np.frombuffer(data, dtype).reshape(count, *shape[1:])
        yield block


def _part_names(path: Path, keys: Sequence[str]) -> dict[str, str]:
    """Map the parts of an `.npz` file ("train", "test", possibly "validation") to the prefixes of their arrays."""
    wanted = [name for name in _PARTS if name != "val" or "val_images" in keys]
    if missing := [key for name in wanted for key in (f"{name}_images", f"{name}_labels") if key not in keys]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(keys)) or 'nothing'}")
    return {_PARTS[name]: name for name in wanted}


def _class_names(
    path: Path, labels: Mapping[str, Tensor], classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], bool]:
    """Return the class names, and a bool: False if their number was derived from class indices, otherwise True.

    If `classes` is None, the names are "0", "1", and so on. Their number is the largest class index + 1, or the width
    of the label rows.
    """
    if len({own.ndim for own in labels.values()}) > 1:
        raise ValueError(
            f"the splits of {path} have labels of different kinds: class indices and rows; store all as one of them"
        )
    rows = labels["train"].ndim == 2
    if classes is not None:
        return classes, True
    derived = [own.shape[1] if rows else check.classes_of(own, f"labels of {path.name}") for own in labels.values()]
    return tuple(str(k) for k in range(derived[0] if rows else max(derived))), rows


def _as_images(array: np.ndarray[Any, Any], name: str) -> Tensor:
    """Check the array `<name>_images`, and return the images as [N, C, H, W]."""
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        raise ValueError(f"{name}_images must be [N, H, W], [N, H, W, 1] or [N, H, W, 3], got {list(array.shape)}")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{name}_images must be uint8 or float, got {array.dtype}")
    if array.dtype.itemsize > 8:
        raise ValueError(f"{name}_images must be uint8 or float of at most 64 bits, got {array.dtype}")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype != np.uint8 and not (array.min() >= 0 and array.max() <= 1):
        raise ValueError(f"{name}_images must be in [0, 1] if float, got {array.min():g} to {array.max():g}")
    return torch.from_numpy(array).permute(0, 3, 1, 2)


def _as_labels(array: np.ndarray[Any, Any], name: str, count: int) -> Tensor:
    """Check the array `<name>_labels`, and return class indices, int64 [N], or multi-label rows, float [N, K]."""
    if array.ndim not in (1, 2) or len(array) != count or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name}_labels must be {count} integers [N] or [N, 1], or rows [N, K], got {array.dtype} "
            f"{list(array.shape)}"
        )
    labels = torch.from_numpy(array.astype(np.int64))
    if labels.ndim == 2 and labels.shape[1] > 1:
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise ValueError(
                f"{name}_labels [N, K] must be rows of 0 and 1, got {int(labels.min())} to {int(labels.max())}"
            )
        return labels.float()
    return labels.flatten()
