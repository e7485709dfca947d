"""Data of the examples: `--data` is either the root of named datasets or the user's own pictures."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distillkit.data import NAMES, Split, load, load_domains, load_folder, load_npz
from distillkit.data.readers.folder import SUFFIXES
from distillkit.study import Task

WHERE = """\
--data (or DISTILLKIT_DATA) is the folder of the datasets: MNIST/raw, FashionMNIST/raw, USPS, MNIST-M, SVHN,
cifar-10-batches-py or cifar10.npz; or, where a script takes your own pictures, their folders: class/picture.png"""


def root_or_pictures(paths: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """Resolve the paths of `--data` to the root of named datasets, or to the user's own pictures.

    Args:
        paths: values of `--data`; at least one path.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    paths = [path.expanduser() for path in paths]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise FileNotFoundError(f"no such file or folder: {', '.join(missing)}\n{WHERE}")
    return (None, paths) if len(paths) > 1 or own_pictures(paths[0]) else (paths[0].resolve(), [])


def own_pictures(path: Path) -> bool:
    """Return whether a path holds the user's own pictures instead of named datasets.

    Args:
        path: an .npz file, or a folder. Named datasets are recognized by their folder or file (`MNIST`, `cifar10.npz`).
    """
    if path.is_file():
        return True
    names = [re.sub(r"\W|_", "", entry.name.lower()) for entry in path.iterdir()]
    if any(name.startswith(tuple(known for known in NAMES if known != "digits")) for name in names):
        return False
    return any(file.suffix.lower() in SUFFIXES for deep in ("*/*", "*/*/*") for file in path.glob(deep))


def require_data(tasks: Iterable[Task]) -> None:
    """Exit with the expected location of the files if the images of a task cannot be read.

    Args:
        tasks: the tasks; each dataset is read once.

    Raises:
        SystemExit: images cannot be read; the message is the loader's.
    """
    seen = set[str]()
    for task in tasks:
        if repr(task.data) not in seen:
            try:
                task.load()
            except (OSError, ValueError) as error:
                raise SystemExit(f"the images of {task.name} cannot be read: {error}\n{WHERE}") from None
        seen.add(repr(task.data))


def file_name(path: Path) -> str:
    """Return the stem of a path, with characters that suit the name of a task."""
    return re.sub(r"[^\w.-]+", "-", path.stem, flags=re.ASCII)


def named_or_own(said: str, root: Path | None, **options: Any) -> tuple[str, Callable[[], Split]]:
    """Return a name, and the function that reads a dataset by its name, a folder of pictures, or an .npz file.

    Args:
        said: name or path.
        root: root of the datasets by name.
        options: options of the reader, such as `size`.
    """
    path = Path(said).expanduser()
    own = partial(load_folder if path.is_dir() else load_npz, path.resolve())
    return file_name(path).lower(), partial(own if path.exists() else partial(load, said, root=root), **options)


def convnet_task(o: argparse.Namespace, said: str) -> Task:
    """Return the task of a dataset by name, of a folder of pictures, or of an .npz file, with a ConvNet of `o.width`.

    Args:
        o: result of `parse_arguments`, with `width` and `size`; without a size, digits and USPS have 16 pixels.
        said: name or path.
    """
    name, load = named_or_own(said, o.data, size=o.size or {"digits": 16, "usps": 16}.get(said))
    depth = 3 if min(load().train.shape[1:]) >= 28 else 2
    return Task(name, load, factory="convnet", factory_options={"width": o.width, "depth": depth})


def own_task(o: argparse.Namespace, **options: Any) -> Task:
    """Return the pictures of `--data` as a task. Several folders are one client each; one folder is partitioned.

    Gray pictures become RGB.

    Args:
        o: result of `parse_arguments`, with `pictures` and `size`.
        options: options of the `Task`. `partition` divides a single folder among clients; otherwise it is not used.
    """
    paths = [path.resolve() for path in o.pictures]
    stems = [file_name(path) for path in paths]
    names = stems if len(set(stems)) == len(stems) else [f"{i}-{stem}" for i, stem in enumerate(stems)]
    if len(paths) > 1:
        sources = dict(zip(names, map(str, paths)))
        own = {**options, "partition": None}
        return Task("-".join(names), partial(load_domains, sources, size=o.size, channels=3, progress=False), **own)
    read = load_npz if paths[0].is_file() else partial(load_folder, progress=False)
    return Task(names[0], partial(read, str(paths[0]), size=o.size, channels=3), **options)
