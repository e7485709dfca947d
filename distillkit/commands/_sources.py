"""Reading of the images that a command names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from distillkit.data import (
    NAMES,
    Split,
    StoredSplit,
    load,
    load_folder,
    load_npz,
    load_set,
    load_table,
    open_folder,
    open_npz,
    open_table,
)
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages

__all__ = ["Sources", "read_set", "source_options"]

_TABLES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Sources:
    """Options with which a command reads sources of images; each has an option of the command line."""

    size: int | tuple[int, int] | None
    channels: int | None
    background: float | None
    root: Path | None
    pictures: Path | None
    image: str | None
    label: str | None
    test_fraction: float
    cache: Path | None
    normalization: Normalization | None = None
    hold_out: str = "random"
    classes: Sequence[str] | None = None

    def read(self, source: str, like: LabeledImages | None = None, *, progress: bool) -> Split | StoredSplit:
        """Read a source, in the form of the set `like` if it is given. The training part of a saved set is the set."""
        if like is None:
            return self._read(source, progress)
        channels, *sides = like.shape
        own = replace(self, size=(sides[0], sides[1]), channels=channels, normalization=like.normalization)
        named = Path(source).is_dir() and like.class_names and like.classes_given
        found = (replace(own, classes=like.class_names) if named else own)._read(source, progress)
        if found.train.normalization != like.normalization and isinstance(found, Split):
            train, test = (part.renormalize(like.normalization) for part in found)
            found = replace(found, train=train, test=test, validation=None)
        return found

    def _read(self, source: str, progress: bool) -> Split | StoredSplit:
        path = Path(source)
        form: dict[str, Any] = {"size": self.size, "channels": self.channels, "normalization": self.normalization}
        cut: dict[str, Any] = {"test_fraction": self.test_fraction, "hold_out": self.hold_out, "progress": progress}
        cut |= {"background": self.background, "classes": self.classes}
        cached: dict[str, Any] = {} if self.cache is None else {"cache": self.cache}
        if path.suffix.lower() in _TABLES:
            columns = {"image": self.image, "label": self.label, "folder": self.pictures}
            named: dict[str, Any] = {name: value for name, value in columns.items() if value is not None}
            return (open_table if cached else load_table)(path, **named, **form, **cut, **cached)
        if path.is_dir() and not (path / "set.json").is_file() and not (path / "images_best.pt").is_file():
            return (open_folder if cached else load_folder)(path, **form, **cut, **cached)
        if path.suffix.lower() == ".npz" and path.is_file() and any(n.startswith("train") for n in np.load(path).files):
            return (open_npz if cached else load_npz)(path, **form, **cached)
        if source in NAMES and not path.exists():
            return load(source, root=self.root, **form)
        data = read_set(source, self.root)
        return Split(data, data[:0], data.class_names or tuple(map(str, range(data.num_classes))))


def read_set(source: str, root: Path | None = None) -> LabeledImages:
    """Read a set: a file or folder of `LabeledImages.save` or `export`, or the name of a shipped set."""
    return load_set(source, root=root)


_OPTIONS = {
    "size": click.option("--size", type=click.IntRange(1), help="Height and width of the images in pixels."),
    "channels": click.option("--channels", type=click.Choice([1, 3]), help="1: make gray; 3: make RGB."),
    "background": click.option("--background", type=click.FloatRange(0, 1), help="Gray behind transparent pixels."),
    "root": click.option("--root", type=click.Path(path_type=Path), help="Data root of named datasets."),
    "pictures": click.option("--pictures", type=click.Path(path_type=Path), help="Folder of a table's files."),
    "image": click.option("--image", help="Column of a table with the files."),
    "label": click.option("--label", help="Column of a table with the labels."),
    "test_fraction": click.option(
        "--test-fraction", type=click.FloatRange(0, 1, max_open=True), default=0.2, show_default=True,
        help="Share of each class held out if the source has no test part.",
    ),
    "cache": click.option("--cache", type=click.Path(path_type=Path), help="Keep pictures there, not in memory."),
}  # fmt: skip


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `Sources` to a command, which gets them as `sources`."""

    @functools.wraps(command)
    def read(**options: Any) -> Any:
        own = {name: options.pop(name) for name in _OPTIONS}
        return command(sources=Sources(**own), **options)

    for option in reversed(_OPTIONS.values()):
        read = option(read)
    return read
