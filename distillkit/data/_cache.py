"""Cache of decoded pictures in a file. Several threads write it together. An interrupted write is resumed.

A cache of N pictures [C, H, W] consists of two files in a folder. `<name>.npy` contains the pictures as a NumPy array,
uint8 [N, C, H, W]. `<name>.safetensors` contains the hash of each picture's bytes and the sums of its channels. The
second file is written last, so its presence means that all pictures are complete. While a cache is being written, the
file `<name>.rows` contains the hashes and sums. The hash of a picture is written after its pixels, so a resumed call
decodes only the pictures whose bytes do not match their hash.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.conversion import format_bytes
from distillkit._utils.files import read_tensors, write_tensors
from distillkit._utils.pixels import AnyPath
from distillkit._utils.progress import bar
from distillkit._utils.threads import thread_pool
from distillkit._utils.user_warnings import warn
from distillkit.locking import locked
from distillkit.normalization import Normalization
from distillkit.sets._stored import PixelFile

Shape = tuple[int, int, int]
Fill: TypeAlias = "Callable[[CacheWriter, Callable[[int], object]], None]"

BLOCK = 32
"""Number of pictures that are processed at a time."""

_FORMAT = "distillkit.pixels/1"
_ROUNDING = "bilinear antialiased float32, luma 601, rounded to uint8"
_DIGEST = 16
_NONE: Mapping[str, str] = {}
_PATIENCE = 24 * 3600.0
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Cache:
    """Opened cache of all pictures of a file or folder.

    Attributes:
        file: open file with the pictures.
        sums: sum and sum of squares of the byte values, for each picture and channel, int64 [N, 2, C].
    """

    file: PixelFile
    sums: Tensor


def cached_normalization(sums: Tensor, shape: Shape) -> Normalization:
    """Return the normalization by mean and standard deviation of cached pictures, without reading the pictures.

    The mean and standard deviation are computed from each picture's sum of byte values and sum of squares. The result
    equals that of `Normalization.of` on the pictures up to rounding, because the sums are exact.
    """
    if not len(sums):
        raise ValueError("cannot measure a normalization without pictures; give normalization=")
    count = len(sums) * shape[1] * shape[2]
    first, second = sums.sum(0).tolist()
    spread = [count * q - s * s for s, q in zip(first, second)]
    return Normalization(
        [s / (255 * count) for s in first], [math.sqrt(v) / (255 * count) if v else 1.0 for v in spread], measured=True
    )


def files_key(files: Iterable[tuple[str, os.stat_result]]) -> str:
    """Return a short hash of a list of files. The hash changes when a file is added, removed, renamed or written.

    Args:
        files: name and file status of each file, in order.
    """
    state = hashlib.blake2b(digest_size=_DIGEST)
    for name, found in files:
        state.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return state.hexdigest()


def open_cache(
    source: Path, key: str, count: int, shape: Shape, fill: Fill, options: str, folder: AnyPath | None, progress: bool
) -> Cache:
    """Open the cache of a file or folder of pictures. Write the cache first if it is missing or outdated.

    Args:
        source: file or folder with the pictures. It is only read.
        key: hash of the current state of the source; see `files_key`. A cache with another key is outdated.
        count: number of pictures.
        shape: shape (C, H, W) of every picture.
        fill: function `fill(writer, advance)` that writes the pictures with the `CacheWriter` `writer`. Whenever n
            further pictures are complete, it calls `advance(n)`, which advances the progress bar.
        options: requested size and channels as text. They are part of the cache's name, so that requests with different
            options use different caches.
        folder: folder of the cache. Default: the folder in the environment variable `DISTILLKIT_CACHE` or, if it is not
            set, the folder `<source>.cache` beside the source.
        progress: whether to show a progress bar.

    Raises:
        OSError: the cache cannot be written, for example because the disk is full.
        ValueError: the folder of the cache is in the folder of the pictures, or its path is not UTF-8.
        distillkit.locking.InUse: another process has held the lock of this cache for a day.
    """
    source = source.resolve()
    chosen = folder if folder is not None else os.environ.get("DISTILLKIT_CACHE")
    where = Path(chosen).expanduser() if chosen else source.with_name(f"{source.name}.cache")
    if source.is_dir() and where.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"cache must not be in the folder of the pictures, {source}, got {where}")
    if _readable(where) != str(where):  # safetensors opens no such path
        raise ValueError(f"cache must be a folder whose path is UTF-8, got {_readable(where)}; give cache=")
    settings = f"{_FORMAT} {_ROUNDING} {count} {shape} {key}"
    prefix = f"{_readable(source.name)}-{_short(f'{source} {options}')}-{'x'.join(map(str, shape))}"
    complete = where / f"{prefix}-{_short(settings)}.safetensors"
    with _LOCK:
        if (found := _read_cache(complete, count, shape)) is not None:
            return found
        size = count * math.prod(shape)
        if not chosen:
            warn(
                f"a cache of {format_bytes(size)} is written to {where}; give cache= (or set DISTILLKIT_CACHE) to use "
                "another folder"
            )
        lock = where / f".{prefix}.lock"
        with _writable(where, size), locked(lock, f"the cache {complete}", wait=_PATIENCE):
            if (found := _read_cache(complete, count, shape)) is None:
                for old in where.glob(f"{glob.escape(prefix)}-*"):  # caches of earlier states of the source
                    if old.stem != complete.stem:
                        old.unlink(missing_ok=True)
                writer = CacheWriter(complete, count, shape)
                what = f"caching {source.name} ({format_bytes(size)})"
                with bar(count, what, unit="picture", progress=progress) as shown:
                    fill(writer, shown.update)
                writer.finish(source)
                found = _read_cache(complete, count, shape)
    assert found is not None
    return found


class CacheWriter:
    """Writer of a cache of decoded pictures. After an interruption, a new writer can add the missing pictures.

    Args:
        complete: path of the `.safetensors` file, which is written last and marks the cache as complete.
        count: number of pictures.
        shape: shape (C, H, W) of every picture.
        resume: whether pictures of an interrupted write are kept.

    Attributes:
        count, shape: see the arguments. If the number of pictures is known only at the end, set `count` then.
    """

    def __init__(self, complete: Path, count: int, shape: Shape, resume: bool = True) -> None:
        self._complete, self.count, self.shape = complete, count, shape
        self._pixels, self._rows = complete.with_suffix(".npy"), complete.with_suffix(".rows")
        self._each, self._row = math.prod(shape), _DIGEST + 16 * shape[0]
        if not (resume and self._resumable()):
            if (free := shutil.disk_usage(complete.parent).free) < count * self._each:
                raise OSError(errno.ENOSPC, f"{format_bytes(free)} are free")
            with self._pixels.open("wb") as file:
                self._write_header(file)
                file.truncate(file.tell() + count * self._each)
            with self._rows.open("wb") as file:
                file.truncate(count * self._row)
        self._start = _header(self._pixels)[0]

    def _write_header(self, file: BinaryIO) -> None:
        """Write the header, whose length does not depend on `count`."""
        header = {"descr": "|u1", "fortran_order": False, "shape": (self.count, *self.shape)}
        np.lib.format.write_array_header_1_0(file, header)

    def _resumable(self) -> bool:
        """Return whether an interrupted write can be resumed.

        This requires that the file of hashes and the file of pixels exist, and that the latter has a valid header.
        """
        if not (self._pixels.exists() and self._rows.exists()):
            return False
        try:
            return _header(self._pixels)[1:] == (self.count, self.shape)
        except ValueError:
            return False

    def missing(self, begin: int, end: int) -> list[int]:
        """Return the indices in range(begin, end) whose pictures are missing or incomplete."""
        with self._rows.open("rb") as rows, self._pixels.open("rb") as pixels:
            rows.seek(begin * self._row)
            known = [rows.read(self._row)[:_DIGEST] for _ in range(begin, end)]
            missing = []
            for row, digest in zip(range(begin, end), known):
                if any(digest):
                    pixels.seek(self._start + row * self._each)
                if not any(digest) or _hash(pixels.read(self._each)) != digest:
                    missing.append(row)
        return missing

    def write(self, begin: int, pictures: Sequence[Tensor]) -> None:
        """Write consecutive pictures, and then the hash and the channel sums (`Cache.sums`) of each picture.

        Args:
            begin: index of the first picture.
            pictures: pictures, each uint8 [C, H, W].
        """
        with self._pixels.open("r+b") as file:
            file.seek(self._start + begin * self._each)
            for picture in pictures:
                file.write(picture.contiguous().numpy().data)
        facts = b"".join(_hash(p.contiguous().numpy().data) + _sums(p).numpy().tobytes() for p in pictures)
        with self._rows.open("r+b") as file:
            file.seek(begin * self._row)
            file.write(facts)

    def finish(self, source: Path, more: Mapping[str, Tensor] | None = None, facts: Mapping[str, str] = _NONE) -> None:
        """Flush the pictures to disk, and mark the cache as complete.

        Args:
            source: file or folder with the pictures; its name is recorded in the cache.
            more, facts: further tensors and facts that are recorded.
        """
        with self._pixels.open("r+b") as file:
            self._write_header(file)
            os.fsync(file.fileno())
        rows = np.frombuffer(self._rows.read_bytes(), np.uint8).reshape(self.count, self._row)
        sums = np.ascontiguousarray(rows[:, _DIGEST:]).view(np.int64).reshape(self.count, 2, self.shape[0])
        tensors = {"digests": torch.from_numpy(rows[:, :_DIGEST].copy()), "sums": torch.from_numpy(sums)}
        facts = {"format": _FORMAT, "source": _readable(source), "rounding": _ROUNDING, **facts}
        write_tensors(self._complete, {**tensors, **(more or {})}, facts)
        self._rows.unlink()


def fill_in_threads(
    cache: CacheWriter, done: Callable[[int], object], picture: Callable[[int], Tensor], workers: int | None
) -> None:
    """Write the missing pictures of a cache in several threads, and call `done(n)` for each n of them."""

    def block(begin: int) -> int:
        end = min(begin + BLOCK, cache.count)
        for row in cache.missing(begin, end):
            cache.write(row, [picture(row)])
        return end - begin

    with thread_pool(_cores() if workers is None else check.positive_int(workers, "workers"), "cache") as pool:
        for future in as_completed([pool.submit(block, begin) for begin in range(0, cache.count, BLOCK)]):
            done(future.result())


def _read_cache(complete: Path, count: int, shape: Shape) -> Cache | None:
    """Return the cache whose `.safetensors` file is `complete`, or None if the cache is missing or damaged."""
    if not (complete.is_file() and complete.with_suffix(".npy").is_file()):
        return None
    try:
        cache, _, _ = open_written(complete)
    except ValueError:
        return None
    return cache if (len(cache.file.digests), cache.file.shape) == (count, shape) else None


def open_written(complete: Path) -> tuple[Cache, dict[str, Tensor], dict[str, str]]:
    """Open the pictures whose `.safetensors` file is `complete`, with everything that was recorded with them.

    Raises:
        ValueError: the files are damaged, or of another kind.
    """
    tensors, facts = read_tensors(complete, kind=_FORMAT, content="the hashes of stored pictures")
    pixels, digests = complete.with_suffix(".npy"), tensors["digests"]
    start, count, shape = _header(pixels)
    if digests.shape != (count, _DIGEST) or pixels.stat().st_size != start + count * math.prod(shape):
        raise ValueError(f"{pixels} is damaged: it does not have the size that {complete} records; delete both")
    return Cache(PixelFile(pixels, start, shape, digests), tensors["sums"]), tensors, facts


def _header(pixels: Path) -> tuple[int, int, Shape]:
    """Return the byte offset of the first picture in an `.npy` file, the number of pictures and their shape."""
    with pixels.open("rb") as file:
        np.lib.format.read_magic(file)
        (count, *shape), fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if fortran or dtype != np.dtype(np.uint8):
            raise ValueError(f"{pixels} must hold pictures of uint8, got {dtype} {[count, *shape]}")
        return file.tell(), count, cast(Shape, tuple(shape))


@contextmanager
def _writable(where: Path, size: int) -> Iterator[None]:
    """Create the folder of a cache. If writing the cache in the `with` block raises an OSError, clarify its message."""
    try:
        where.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write a cache of {format_bytes(size)} to {where} ({error.strerror or error}); give "
            "cache=, a folder with enough space",
        ) from error


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=6).hexdigest()


def _readable(path: AnyPath) -> str:
    """Return a path with a replacement for what is not UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def _sums(picture: Tensor) -> Tensor:
    flat = picture.flatten(1)
    return torch.stack([flat.sum(1), flat.int().square().sum(1, dtype=torch.int64)])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
