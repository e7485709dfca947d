"""Atomic writing of files, and writing and reading of tensors in safetensors files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check


@contextlib.contextmanager
def atomic_replace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file in a `with` block, so that readers see either the old or the complete new file.

    The block gets the path of a temporary file next to `path`, and writes to it. At the end of the block, the temporary
    file replaces `path`. If the block raises an exception, the temporary file is removed. If the process is killed, the
    old file remains. The data is not synced to disk, so the content after a power loss depends on the file system.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask allows; safetensors makes its files readable for one user only
        yield temporary
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a small file atomically. Its folder is created if it does not exist."""
    check.folder(Path(path).parent, f"the folder of {path}").mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a new file's name survives a crash.

    On systems other than POSIX, which cannot open folders, the function does nothing.
    """
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def contiguous_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the form that safetensors requires: on the CPU, contiguous and without shared memory."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def checksum(tensors: Mapping[str, Tensor], strings: Mapping[str, str]) -> str:
    """Return a checksum of contiguous tensors on the CPU and of strings, by their names."""
    state = hashlib.blake2b(json.dumps(dict(sorted(strings.items()))).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        if tensor.numel():
            state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> Path:
    """Write named tensors, metadata and their checksum to a `.safetensors` file atomically, and return its path."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored = contiguous_cpu(tensors)
    with atomic_replace(path) as temporary:
        try:
            save_file(stored, temporary, metadata={**facts, "checksum": checksum(stored, facts)})
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error
    return Path(path)


def read_tensors(path: str | os.PathLike[str], *, kind: str, content: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file that `write_tensors` wrote, and return its tensors, on the CPU, and its metadata."""
    from safetensors import SafetensorError, safe_open

    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the path of a file that holds {content}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; it should hold {content}")
    try:
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    if facts.get("format") != kind:
        raise ValueError(f"{path} is not {content} (format {facts.get('format')!r}, want {kind!r})")
    if facts.pop("checksum", None) != checksum(tensors, facts):
        raise ValueError(f"{path} is damaged: its content does not match its checksum. Restore it, or write it again")
    return tensors, facts


def read_bytes(path: Path, error: type[Exception]) -> bytes:
    """Read a file; whatever goes wrong is raised as `error`, which names the file."""
    try:
        return path.read_bytes()
    except FileNotFoundError as why:
        raise error(f"{path} is missing: restore it") from why
    except OSError as why:
        raise error(f"{path} cannot be read: {why.strerror or why}") from why


def parse_json(data: bytes | str, path: Path, error: type[Exception], line: int | None = None) -> Any:
    """Parse the JSON of a file or of one line; whatever goes wrong is raised as `error`, which names the file."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as why:
        part = "it" if line is None else f"line {line}"
        raise error(f"{path} is damaged: {part} cannot be read ({why})") from why
