"""Data of the examples: `--data` is either the root of named datasets or the user's own pictures."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distillkit.data import NAMES, load_domains, load_folder, load_npz
from distillkit.data.readers.folder import SUFFIXES
from distillkit.study import Task

__all__ = ["own_task", "refuse_data", "refuse_unused", "require_data", "root_or_pictures"]

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
    return (None, paths) if len(paths) > 1 or own_pictures(paths[0]) else (paths[0], [])


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


def refuse_data(parser: argparse.ArgumentParser, o: argparse.Namespace) -> None:
    """Exit if `--data` was given to a script that uses scikit-learn's digits.

    Args:
        parser: the script's parser.
        o: the parsed arguments.

    Raises:
        SystemExit: `--data` was given.
    """
    if o.data is not None:
        parser.error(f"--data {o.data} has no effect: these digits come with scikit-learn; omit it")


def refuse_unused(
    parser: argparse.ArgumentParser, words: Sequence[str] | None, why: str, *options: str, unless: object = False
) -> None:
    """Exit if an option was given that has no effect because of other options.

    Args:
        parser: the script's parser.
        words: the words that the parser parses; None for the command line.
        why: reason why the options are ignored, such as "without --dp".
        options: the ignored options, such as "--epsilon".
        unless: condition under which the options have an effect; if true, the function does nothing.
    """
    nothing: dict[str, list[Any]] = {option: [] for option in options}
    marked = {option[2:].replace("-", "_"): mark for option, mark in nothing.items()}
    found = vars(parser.parse_args(words, argparse.Namespace(**marked)))
    given = [option for option, mark in nothing.items() if found[option[2:].replace("-", "_")] is not mark]
    if given and not unless:
        parser.error(f"{given[0]} has no effect {why}; omit it")


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


def own_task(o: argparse.Namespace, **options: Any) -> Task:
    """Return the pictures of `--data` as a task. Several folders are one client each; one folder is partitioned.

    Gray pictures become RGB.

    Args:
        o: result of `parse_arguments`, with `pictures` and `size`.
        options: options of the `Task`. `partition` divides a single folder among clients; otherwise it is not used.
    """
    paths = [path.resolve() for path in o.pictures]
    stems = [re.sub(r"[^\w.-]+", "-", path.stem, flags=re.ASCII) for path in paths]
    names = stems if len(set(stems)) == len(stems) else [f"{i}-{stem}" for i, stem in enumerate(stems)]
    if len(paths) > 1:
        sources = dict(zip(names, map(str, paths)))
        own = {**options, "partition": None}
        return Task("-".join(names), partial(load_domains, sources, size=o.size, channels=3, progress=False), **own)
    load = load_npz if paths[0].is_file() else partial(load_folder, progress=False)
    return Task(names[0], partial(load, str(paths[0]), size=o.size, channels=3), **options)
