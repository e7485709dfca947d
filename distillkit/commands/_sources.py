"""Reading of the images that a command names."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from distillkit.commands._results import refuse_given
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
    set_cards,
)
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages

_TABLES = (".csv", ".tsv", ".parquet")
_COLUMNS = ("image", "label", "folder")
_OF_SETS = ("set.json", "set.safetensors", "images_best.pt")
_SETS = (".safetensors", ".npz", ".pt", ".pth")


@dataclass(frozen=True)
class Sources:
    """Options with which a command reads sources of images; each has an option of the command line."""

    size: int | tuple[int, int] | None
    channels: int | None
    background: float | None
    root: Path | None
    folder: Path | None
    image: str | None
    label: str | None
    test_fraction: float
    cache: Path | None
    normalization: Normalization | None
    hold_out: str = "random"
    classes: Sequence[str] | None = None

    def read(self, source: str, like: LabeledImages | None = None, *, progress: bool) -> Split | StoredSplit:
        """Read a source, in the form of the set `like` if it is given. The training part of a saved set is the set."""
        if like is None:
            return self._read(source, progress)
        refuse_given("because the set has its own form", "size", "channels")
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
            given = {name: getattr(self, name) for name in _COLUMNS}
            named = {name: value for name, value in given.items() if value is not None}
            return (open_table if cached else load_table)(path, **named, **form, **cut, **cached)
        refuse_given(f"for {source}, which is no table", *_COLUMNS)
        if _is_class_folder(path):
            return (open_folder if cached else load_folder)(path, **form, **cut, **cached)
        refuse_given(f"for {source}, which is no folder or table of pictures", "background", "test_fraction")
        if _has_splits(path):
            return (open_npz if cached else load_npz)(path, **form, **cached)
        refuse_given(f"for {source}, which is read into memory", "cache")
        if source.lower() in NAMES and not path.exists():
            return load(source.lower(), root=self.root, **form)
        refuse_given(f"for {source}, which is a set with its own form", "size", "channels")
        data = self.read_set(source)
        return Split(data, data[:0], data.class_names or tuple(map(str, range(data.num_classes))))

    def read_set(self, source: str) -> LabeledImages:
        """Read a set; see the function `read_set`."""
        return read_set(source, self.root, self.normalization)


def read_set(source: str, root: Path | None, normalization: Normalization | None) -> LabeledImages:
    """Read a set: a file or folder of `save` or `export`, a file of a paper's release, or a shipped set's name."""
    path = Path(source)
    if not path.exists() and source not in set_cards() and not source.startswith("hf://"):
        raise FileNotFoundError(
            f"no folder, file, set or dataset {source!r}; `distillkit sets` lists the sets, and the datasets are "
            f"{', '.join(NAMES)}"
        )
    if path.is_file() and path.suffix.lower() not in _SETS:
        raise ValueError(f"{source} must be a folder, a table or a set ({', '.join(_SETS)})")
    needed = path.suffix.lower() in _SETS[2:] or (path / "images_best.pt").is_file()
    if needed and normalization is None:
        raise click.UsageError(f"{source} does not contain its normalization: give --normalization MEAN STD")
    if not needed and not _is_class_folder(path):
        refuse_given(f"for {source}, which contains it", "normalization")
        normalization = None
    return load_set(source, root=root, normalization=normalization)


def write_set(data: LabeledImages, out: Path) -> None:
    """Write a set to a file, or export it to a folder."""
    data.save(out) if out.suffix == _SETS[0] else data.export(out)


def set_path(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Check an option that names a set to write: a file with a known suffix, or a folder."""
    if path is not None and (not path.name or path.suffix not in ("", *_SETS[:2])):
        raise click.BadParameter(f"must end in {_SETS[0]} or {_SETS[1]}, or be a folder without suffix, got {path}")
    return path


def numbers(context: click.Context, option: click.Parameter, text: str) -> tuple[float, ...]:
    """Convert the text of an option to numbers, which commas separate."""
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"must be numbers separated by commas, got {text!r}") from error


def _is_class_folder(path: Path) -> bool:
    """Return whether a path is a folder of pictures that is no set of a known form."""
    return path.is_dir() and not any((path / name).is_file() for name in _OF_SETS)


def _has_splits(path: Path) -> bool:
    """Return whether an .npz file has the arrays of `load_npz`."""
    try:
        with zipfile.ZipFile(path) as file:
            return "train_images.npy" in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _normalized(context: click.Context, option: click.Parameter, texts: tuple[str, str] | None) -> Any:
    if texts is None:
        return None
    mean, std = (numbers(context, option, text) for text in texts)
    return Normalization(mean, std)


NORMALIZATION = click.option(
    "--normalization", nargs=2, metavar="MEAN STD", callback=_normalized,
    help="By channel, such as 0.5,0.5,0.5 0.2,0.2,0.2; default: that of a set, or measured.",
)  # fmt: skip
ROOT = click.option("--root", type=click.Path(path_type=Path), help="Data root of named datasets.")

_OPTIONS = {
    "size": click.option("--size", type=click.IntRange(1), help="Height and width of the images in pixels."),
    "channels": click.option("--channels", type=click.Choice([1, 3]), help="1: make grayscale; 3: make RGB."),
    "background": click.option("--background", type=click.FloatRange(0, 1), help="Gray behind transparent pixels."),
    "root": ROOT,
    "folder": click.option("--folder", type=click.Path(path_type=Path), help="Folder of a table's files."),
    "image": click.option("--image", help="Column of a table with the files."),
    "label": click.option("--label", help="Column of a table with the labels."),
    "test_fraction": click.option(
        "--test-fraction", type=click.FloatRange(0, 1, max_open=True), default=0.2, show_default=True,
        help="Share of each class held out if the source has no test part.",
    ),
    "cache": click.option("--cache", type=click.Path(path_type=Path), help="Keep pictures there, not in memory."),
    "normalization": NORMALIZATION,
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
