"""What lies where in a folder of pictures: splits, classes, files; what is not read is said."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._sanity_checks import warn

__all__ = ["SUFFIXES", "Listing", "parts_of", "pictures_of", "subfolders", "survey"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
}


@dataclass(frozen=True)
class Listing:
    """Which pictures a dataset has; nothing is decoded yet.

    Attributes:
        files: by part ("train", "test" and perhaps "validation"), in the order in which they are read.
        labels: by part, class indices int64 [N] or rows float [N, K].
        classes: their names, in label order.
        info: what sets made of them say of their origin.
        columns: by part, what else belongs to each picture.
        users: what the column `user` counts in.
    """

    files: dict[str, list[Path]]
    labels: dict[str, Tensor]
    classes: tuple[str, ...]
    info: dict[str, Any]
    columns: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    users: tuple[str, ...] = ()


def survey(path: Path) -> Listing:
    """Look at a folder of pictures, without opening one.

    Args:
        path: see `load_folder`.

    Raises:
        FileNotFoundError, ValueError: no such folder, or none laid out as it must be; see `load_folder`.
    """
    info: dict[str, Any] = {"dataset": path.resolve().name}
    parts, beside = parts_of(path)
    classes = [folder.name for folder in subfolders(parts["train"])]
    if not classes:
        raise FileNotFoundError(f"{parts['train']} has no sub-folders; want one a class: class/picture.png")
    listed = {part: pictures_of(folder, classes, part) for part, folder in parts.items()}
    if ignored := sum(others for _, _, others in listed.values()):
        info["files_ignored"] = ignored
    if beside:
        info["folders_ignored"] = beside
    files = {part: found for part, (found, _, _) in listed.items()}
    labels = {part: torch.tensor(found, dtype=torch.long) for part, (_, found, _) in listed.items()}
    return Listing(files, labels, tuple(classes), info)


def subfolders(path: Path) -> list[Path]:
    """The folders in `path`, sorted, without hidden ones: the classes of a split, say.

    Raises:
        FileNotFoundError: no such folder.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}; want class/picture.png below it, or train/class/picture.png")
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def parts_of(path: Path) -> tuple[dict[str, Path], list[str]]:
    """Which folders are the splits of a dataset in `path`, and the names of folders beside them.

    Without splits all of `path` is `train`.

    The splits are `train` (`training`), `test` (`testing`) and `val` (`valid`, `validation`), in any case. `train`
    without class folders of its own is a class, unless a `test` or `val` lies beside it.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: two folders of one split, or a `test` or `val` without a `train` that holds class folders.
    """
    folders = subfolders(path)
    named = [(folder, _SPLITS.get(folder.name.lower())) for folder in folders]
    found = {part: folder for folder, part in named if part}
    if twice := [part for part, n in Counter(part for _, part in named if part).items() if n > 1]:
        names = ", ".join(folder.name for folder, part in named if part == twice[0])
        raise ValueError(f"{path} has several folders for {twice[0]}: {names}; leave one")
    if "train" in found and subfolders(found["train"]):
        beside = [folder.name for folder, part in named if not part]
        if beside:
            warn(f"{path} has folders beside its splits, which are not read: {', '.join(beside)}")
        return found, beside
    if set(found) - {"train"}:
        names = ", ".join(folder.name for part, folder in found.items() if part != "train")
        raise ValueError(
            f"{path} has {names}, but no train folder with class folders in it; want train/class/picture.png and "
            "test/class/picture.png, and another name for a class that is called so"
        )
    return {"train": path}, []


def pictures_of(folder: Path, classes: list[str], part: str) -> tuple[list[Path], list[int], int]:
    """The pictures of one split, their labels, and how many other files its class folders hold.

    Args:
        folder: of the split.
        classes: names of the class folders, in label order.
        part: "train", "test" or "validation".

    Raises:
        FileNotFoundError: a class of `train` without pictures, or a link to nothing.
        ValueError: a class that `train` has not, or a `test` or `validation` without any picture in a class folder.
    """
    if unknown := [found.name for found in subfolders(folder) if found.name not in classes]:
        raise ValueError(f"{folder} has classes that the training split does not: {', '.join(unknown)}")
    files: list[Path] = []
    labels: list[int] = []
    others = 0
    for label, name in enumerate(classes):
        below = _files(folder / name)
        found = [f for f in below if f.suffix.lower() in SUFFIXES]
        if part == "train" and not found:
            raise FileNotFoundError(f"class folder {folder / name} holds no pictures ({', '.join(SUFFIXES)})")
        others += len(below) - len(found)
        files += found
        labels += [label] * len(found)
    flat = sum(f.suffix.lower() in SUFFIXES for f in folder.iterdir() if not f.name.startswith("."))
    if not files:
        held = f"{flat} pictures but no class folders" if flat else "no pictures"
        raise ValueError(
            f"{folder} holds {held}; want {folder.name}/class/picture.png, or no {folder.name} at all (then a part of "
            "train is held back: test_fraction)"
        )
    if flat:
        warn(f"{flat} pictures lie in {folder} itself, beside the class folders, and are not read")
    if part == "train" and len(inner := _inner(files, labels, folder)) > 1:
        first = f"{classes[0]!r}: {str(folder / classes[0])!r}"
        warn(
            f"{folder} has the classes {_few(classes)}, and each holds the folders {_few(inner)}; if those are the "
            f"classes and {_few(classes)} are data sets, read one, load_folder({str(folder / classes[0])!r}), or all, "
            f"load_domains({{{first}, ...}})"
        )
    return files, labels, others


def _inner(files: list[Path], labels: list[int], folder: Path) -> list[str]:
    """The names of folders that lie in every class folder, if all pictures lie in folders inside class folders."""
    inside: dict[int, set[str]] = {label: set() for label in labels}
    for file, label in zip(files, labels):
        parts = file.relative_to(folder).parts
        if len(parts) < 3:
            return []
        inside[label].add(parts[1])
    return sorted(set.intersection(*inside.values())) if len(inside) > 1 else []


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _files(folder: Path) -> list[Path]:
    """All files below `folder`, sorted, without hidden ones."""
    files: list[Path] = []
    if not folder.is_dir():
        return files
    for root, inside, names in os.walk(folder):
        inside[:] = [name for name in inside if not name.startswith(".")]
        if links := [name for name in inside if Path(root, name).is_symlink()]:
            warn(f"{root} has links to folders, which are not followed: {', '.join(links)}")
        files += [Path(root, name) for name in names if not name.startswith(".")]
    if broken := [file for file in sorted(files) if not file.exists()]:
        raise FileNotFoundError(f"{broken[0]} is a link to nothing ({len(broken)} such in {folder}); mend or delete it")
    return sorted(files)
