"""Files that are whole or not there at all, and tensors in them: what every part of the project saves with."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

__all__ = ["atomic_replace", "contiguous_cpu", "read_tensors", "write_atomically", "write_tensors"]


@contextlib.contextmanager
def atomic_replace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file in a `with` block so that a reader finds the old one or the new one, never a part of either.

    Gives the path of a temporary file beside `path`, for the block to write. It takes the place of `path` when the
    block ends, and is removed if the block raises. A kill of this process loses no file; nothing is synced, so what a
    machine loses that loses its power is up to the file system.

    Raises:
        OSError: the folder is missing or unwritable, or the disk is full; a file that was there before is left as is.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a small file as a whole, so that a reader never finds a part of it. Its folder is made.

    Args:
        path: the file.
        data: bytes, or text, which is written as UTF-8.

    Raises:
        OSError: see `atomic_replace`.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def contiguous_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors wants them: on the CPU, contiguous, none sharing its memory with another.

    Args:
        tensors: by name, on any device.
    """
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> Path:
    """Write named tensors and strings to one `.safetensors` file as a whole; return its path.

    Args:
        path: the file; its folder exists.
        tensors: on any device.
        facts: the file's metadata; `format` among them tells files of different kinds apart (see `read_tensors`).

    Raises:
        OSError: see `atomic_replace`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_replace(path) as temporary:
        try:
            save_file(contiguous_cpu(tensors), temporary, metadata=dict(facts))
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error
    return Path(path)


def read_tensors(path: str | os.PathLike[str], *, kind: str, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_tensors` wrote: the tensors, on the CPU, and the facts.

    Args:
        path: the file.
        kind: the `format` that its facts must name.
        what: the thing that it holds, for messages: "a saved LabeledImages".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of another kind.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; it should hold {what}")
    try:
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    if facts.get("format") != kind:
        raise ValueError(f"{path} is not {what} (format {facts.get('format')!r}, want {kind!r})")
    return tensors, facts
