"""A cache of pictures: decoded and resized once into one file of bytes, by several threads, and gone on with if killed.

A cache of N pictures [C, H, W] is two files in a folder: `<name>.npy`, uint8 [N, C, H, W], which any NumPy reads; and
`<name>.safetensors`, which is written last, so that where it is the pixels are whole. It holds for each picture the
hash of its bytes and its channels' sums. While a cache is being made, `<name>.rows` holds these: a row of them is
written after the picture it is of, so that a killed process is gone on with at the first picture whose bytes and hash
do not agree.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from distillkit._sanity_checks import warn
from distillkit._utils import check
from distillkit._utils.conversion import format_bytes
from distillkit._utils.files import read_tensors, write_tensors
from distillkit._utils.progress import bar
from distillkit._utils.threads import thread_pool
from distillkit.locking import locked
from distillkit.normalization import Normalization
from distillkit.sets._stored import PixelFile

__all__ = ["BLOCK", "Cache", "Fill", "Unfinished", "as_bytes", "in_threads", "listing_key", "measured", "open_cache"]

Shape = tuple[int, int, int]
Fill: TypeAlias = "Callable[[Unfinished, Callable[[int], object]], None]"

BLOCK = 32
"""Pictures that are worked on at a time."""

_FORMAT = "distillkit.pixels/1"
_ROUNDING = "bilinear antialiased float32, luma 601, rounded to uint8"
_DIGEST = 16
_PATIENCE = 24 * 3600.0
_turn = threading.Lock()


@dataclass(frozen=True)
class Cache:
    """A whole cache, opened.

    Attributes:
        file: the pictures.
        sums: int64 [N, 2, C], of each picture the sums and the sums of squares of its channels' bytes.
    """

    file: PixelFile
    sums: Tensor


def as_bytes(pixels: Tensor) -> Tensor:
    """Pixels as a cache holds them: uint8, each within 1/510 of what it was, and exact if it came from a byte.

    Args:
        pixels: float [..., H, W] in [0, 1].
    """
    return (pixels * 255).round().to(torch.uint8)


def measured(sums: Tensor, shape: Shape) -> Normalization:
    """Mean and standard deviation of pictures in a cache, in exact arithmetic; as `Normalization.of`, without reading.

    Args:
        sums: `Cache.sums` of the pictures that count, int64 [n, 2, C].
        shape: (C, H, W).

    Raises:
        ValueError: no pictures.
    """
    if not len(sums):
        raise ValueError("there are no pictures to measure the normalization of; give normalization=")
    count = len(sums) * shape[1] * shape[2]
    first, second = sums.sum(0).tolist()
    spread = [count * q - s * s for s, q in zip(first, second)]
    return Normalization(
        [s / (255 * count) for s in first], [math.sqrt(v) / (255 * count) if v else 1.0 for v in spread], measured=True
    )


def listing_key(files: Iterable[tuple[str, os.stat_result]]) -> str:
    """A short text that differs when a source does: when a file comes, goes, moves or is written.

    Args:
        files: the name of each and what the file system says of it, in order.
    """
    state = hashlib.blake2b(digest_size=_DIGEST)
    for name, found in files:
        state.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return state.hexdigest()


def open_cache(
    source: Path,
    key: str,
    count: int,
    shape: Shape,
    fill: Fill,
    *,
    asked: str,
    folder: str | os.PathLike[str] | None,
    progress: bool,
) -> Cache:
    """The cache of a source, made now if it is not there, or if the source has changed since.

    Args:
        source: the file or folder that the pictures are from; it is only read.
        key: what tells this state of it from others.
        count: how many pictures there are.
        shape: (C, H, W) of them all.
        fill: puts them in: is given the unfinished cache, and a function to call with how many more are there.
        asked: the size and channels that were asked for, in words: what is refused with some must not be found with
            others.
        folder: where the cache is. Default: the environment variable `DISTILLKIT_CACHE`, else beside the source.
        progress: whether long work shows a bar.

    Raises:
        OSError: the cache cannot be written, or has no room.
        distillkit.locking.InUse: another process has been making the same cache for a day.
    """
    source = source.resolve()
    place = folder if folder is not None else os.environ.get("DISTILLKIT_CACHE")
    where = Path(place).expanduser() if place else source.with_name(f"{source.name}.cache")
    settings = f"{_FORMAT} {_ROUNDING} {count} {shape} {key}"
    prefix = f"{source.name}-{_short(f'{source} {asked}')}-{'x'.join(map(str, shape))}"
    whole = where / f"{prefix}-{_short(settings)}.safetensors"
    with _turn:
        if (found := _opened(whole, count, shape)) is not None:
            return found
        size = count * math.prod(shape)
        if not place:
            warn(
                f"a cache of {format_bytes(size)} is written to {where}; give cache= (or set DISTILLKIT_CACHE) to have "
                "it elsewhere"
            )
        lock = where / f".{prefix}.lock"
        with _writable(where, size), locked(lock, f"the cache {whole}", wait=_PATIENCE):
            if (found := _opened(whole, count, shape)) is None:
                for old in where.glob(f"{glob.escape(prefix)}-*"):  # of the source as it was
                    if old.stem != whole.stem:
                        old.unlink(missing_ok=True)
                unfinished = Unfinished(whole, count, shape)
                what = f"caching {source.name} ({format_bytes(size)})"
                with bar(count, what, unit="picture", progress=progress) as shown:
                    fill(unfinished, shown.update)
                unfinished.finish(source)
                found = _opened(whole, count, shape)
    assert found is not None
    return found


class Unfinished:
    """A cache that is being made: its two files, and which of its pictures are there already.

    Args:
        whole: the file that is written last.
        count: how many pictures there are.
        shape: (C, H, W) of them all.

    Attributes:
        count, shape: as given.
    """

    def __init__(self, whole: Path, count: int, shape: Shape) -> None:
        self._whole, self.count, self.shape = whole, count, shape
        self._pixels, self._rows = whole.with_suffix(".npy"), whole.with_suffix(".rows")
        self._each, self._row = math.prod(shape), _DIGEST + 16 * shape[0]
        if not self._begun():
            _require_room(whole.parent, count * self._each)
            with self._pixels.open("wb") as file:
                header = {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
                np.lib.format.write_array_header_1_0(file, header)
                file.truncate(file.tell() + count * self._each)
            with self._rows.open("wb") as file:
                file.truncate(count * self._row)
        self._start = _start_of(self._pixels, count, shape)

    def _begun(self) -> bool:
        """Whether there is something to go on with: a machine that died may have lost the beginning of the file."""
        if not (self._pixels.exists() and self._rows.exists()):
            return False
        try:
            return _start_of(self._pixels, self.count, self.shape) > 0
        except ValueError:
            return False

    def lacking(self, begin: int, end: int) -> list[int]:
        """Which of the pictures `begin` to `end` - 1 are not there, or not whole."""
        with self._rows.open("rb") as rows, self._pixels.open("rb") as pixels:
            rows.seek(begin * self._row)
            known = [rows.read(self._row)[:_DIGEST] for _ in range(begin, end)]
            lacking = []
            for row, digest in zip(range(begin, end), known):
                if any(digest):
                    pixels.seek(self._start + row * self._each)
                if not any(digest) or _hash(pixels.read(self._each)) != digest:
                    lacking.append(row)
        return lacking

    def write(self, begin: int, pictures: Sequence[Tensor]) -> None:
        """Put `pictures`, uint8 [C, H, W] each, where those from `begin` on belong; then say that they are there."""
        with self._pixels.open("r+b") as file:
            file.seek(self._start + begin * self._each)
            for picture in pictures:
                file.write(picture.contiguous().numpy().data)
        facts = b"".join(_hash(p.contiguous().numpy().data) + _sums(p).numpy().tobytes() for p in pictures)
        with self._rows.open("r+b") as file:
            file.seek(begin * self._row)
            file.write(facts)

    def finish(self, source: Path) -> None:
        """All pictures of the `source` are there: see to it that they are on the disk, and say so."""
        with self._pixels.open("r+b") as file:
            os.fsync(file.fileno())
        rows = np.frombuffer(self._rows.read_bytes(), np.uint8).reshape(self.count, self._row)
        sums = np.ascontiguousarray(rows[:, _DIGEST:]).view(np.int64).reshape(self.count, 2, self.shape[0])
        tensors = {"digests": torch.from_numpy(rows[:, :_DIGEST].copy()), "sums": torch.from_numpy(sums)}
        write_tensors(self._whole, tensors, {"format": _FORMAT, "source": str(source), "rounding": _ROUNDING})
        self._rows.unlink()


def in_threads(picture: Callable[[int], Tensor], workers: int | None) -> Fill:
    """Fill a cache from pictures that can be had in any order, those that are there already excepted.

    Args:
        picture: gives picture i as uint8 [C, H, W]; called in several threads.
        workers: how many. Default: as many as this process has cores.
    """
    workers = _cores() if workers is None else check.positive_int(workers, "workers")

    def fill(cache: Unfinished, done: Callable[[int], object]) -> None:
        def block(begin: int) -> int:
            end = min(begin + BLOCK, cache.count)
            for row in cache.lacking(begin, end):
                cache.write(row, [picture(row)])
            return end - begin

        with thread_pool(workers, "cache") as pool:
            for future in as_completed([pool.submit(block, begin) for begin in range(0, cache.count, BLOCK)]):
                done(future.result())

    return fill


def _opened(whole: Path, count: int, shape: Shape) -> Cache | None:
    """The cache, if it is whole."""
    pixels = whole.with_suffix(".npy")
    if not (whole.is_file() and pixels.is_file()):
        return None
    try:
        tensors, _ = read_tensors(whole, kind=_FORMAT, what="the hashes of cached pictures")
        start = _start_of(pixels, count, shape)
    except ValueError:
        return None
    if tensors["digests"].shape != (count, _DIGEST) or pixels.stat().st_size != start + count * math.prod(shape):
        return None
    return Cache(PixelFile(pixels, start, shape, tensors["digests"]), tensors["sums"])


def _start_of(pixels: Path, count: int, shape: Shape) -> int:
    """Where the first picture begins in an `.npy` file.

    Raises:
        ValueError: it holds something else.
    """
    with pixels.open("rb") as file:
        np.lib.format.read_magic(file)
        found, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if found != (count, *shape) or fortran or dtype != np.dtype(np.uint8):
            raise ValueError(f"{pixels} holds {dtype} {list(found)}, want uint8 {[count, *shape]}")
        return file.tell()


@contextmanager
def _writable(where: Path, size: int) -> Iterator[None]:
    """A folder in which a cache can be made.

    Raises:
        OSError: it cannot be made or written, or has no room; says what to do.
    """
    try:
        where.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write a cache of {format_bytes(size)} to {where} ({error.strerror or error}); give cache=, a "
            "folder that has room for it",
        ) from error


def _require_room(where: Path, size: int) -> None:
    free = shutil.disk_usage(where).free
    if free < size:
        raise OSError(errno.ENOSPC, f"{format_bytes(free)} are free")


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=6).hexdigest()


def _sums(picture: Tensor) -> Tensor:
    flat = picture.flatten(1)
    return torch.stack([flat.sum(1), flat.int().square().sum(1, dtype=torch.int64)])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
