"""Detection of the splits, classes and files in a folder of pictures."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distillkit._utils.user_warnings import warn
from distillkit.data.readers._picture_decoding import Problems
from distillkit.data.readers._picture_list import PictureList
from distillkit.sets._export import is_exported_folder
from distillkit.sets._validation import FOUND_CLASSES, checked_class_names

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
}
"""The part of a dataset by the names of its folder, or in a table's column."""
_LIKE_A_SPLIT = re.compile(rf"(?i:{'|'.join(SPLITS)})(?![a-z])")
_UNREAD = (".avif", ".dcm", ".heic", ".heif", ".jfif", ".jp2", ".npy", ".npz", ".svg")
"""Endings of files that probably are images, too, but cannot be read."""
_TABLES = (".csv", ".tsv", ".xls", ".xlsx", ".parquet")


def list_folder(path: Path, declared: Sequence[str] | None = None) -> PictureList:
    """List the pictures of a folder without opening them.

    Args:
        path: folder in a layout that `load_folder` accepts.
        declared: names of the class folders; None for those that exist.

    Raises:
        FileNotFoundError, ValueError: the folder does not exist or has another layout; see `load_folder`.
    """
    info: dict[str, Any] = {"dataset": path.resolve().name}
    parts, skipped = split_folders(path)
    for folder in parts.values():
        if is_exported_folder(folder):
            raise ValueError(
                f"{folder} is an exported LabeledImages, with labels and normalization in set.json and labels.csv; "
                f"read it with LabeledImages.load({str(folder)!r}), or delete both files to read only the pictures"
            )
    classes = list(checked_class_names(declared or ()))
    if declared is None:
        classes = [folder.name for folder in subfolders(parts["train"])]
        info["classes"] = FOUND_CLASSES
        if not classes:
            raise FileNotFoundError(f"{parts['train']} has no sub-folders; expected one per class: class/picture.png")
        _require_class_folders(path, parts["train"], classes)
    elif not classes:
        raise ValueError("classes must have at least one name, or be None for the folders that exist")
    problems: Problems = {}
    listed = {
        part: _class_pictures(folder, classes, part, declared is not None, problems) for part, folder in parts.items()
    }
    if ignored := sum(others for _, _, others in listed.values()):
        info["files_ignored"] = ignored
    if skipped:
        info["folders_ignored"] = skipped
    files = {part: found for part, (found, _, _) in listed.items()}
    labels = {part: torch.tensor(found, dtype=torch.long) for part, (_, found, _) in listed.items()}
    return PictureList(files, labels, tuple(classes), info, open_with="open_folder", problems=problems)


def subfolders(path: Path) -> list[Path]:
    """Return the visible folders in `path`, sorted.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}; expected class/picture.png below it, or train/class/picture.png")
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def split_folders(path: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the folder of each split in `path`, and the names of the folders in `path` that belong to no split.

    A split is a folder named `train` or `training`, `test` or `testing`, or `val`, `valid` or `validation`, in upper or
    lower case. If there are no such folders, `path` itself is the split `train`. A folder `train` without class folders
    is treated as a class named "train", not as a split.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: two folders are the same split, or there is a `test` or `val`, but no `train` with class folders.
    """
    folders = subfolders(path)
    named = [(folder, SPLITS.get(folder.name.lower())) for folder in folders]
    found = {part: folder for folder, part in named if part}
    if twice := [part for part, n in Counter(part for _, part in named if part).items() if n > 1]:
        names = ", ".join(folder.name for folder, part in named if part == twice[0])
        raise ValueError(f"{path} has several folders for {twice[0]}: {names}; keep one")
    if "train" in found and subfolders(found["train"]):
        others = [folder.name for folder, part in named if not part]
        if others:
            warn(f"{path} has folders beside its splits, which are not read: {', '.join(others)}")
        return found, others
    if set(found) - {"train"}:
        names = ", ".join(folder.name for part, folder in found.items() if part != "train")
        raise ValueError(
            f"{path} has {names}, but no train folder with class folders in it; expected train/class/picture.png "
            "and test/class/picture.png; rename a class that is called like a split"
        )
    return {"train": path}, []


def _require_class_folders(path: Path, train: Path, classes: list[str]) -> None:
    """Refuse sub-folders that are probably not classes."""
    like_splits = [name for name in classes if _LIKE_A_SPLIT.match(name)]
    tables = sorted(f for f in {*path.iterdir(), *train.iterdir()} if f.suffix.lower() in _TABLES)
    remedy = f"expected {train.name}/class/picture.png; sort the pictures into one folder per class"
    if tables and (like_splits or len(classes) == 1):
        names = _few([table.name for table in tables])
        raise ValueError(
            f"{train} has {_few(classes)} beside {names}, which probably holds the labels; read it with "
            f"load_table({str(tables[0])!r}, folder={str(train / classes[0])!r}); otherwise, {remedy}"
        )
    if len(like_splits) == len(classes):
        raise ValueError(f"{train} has {_few(classes)}, which look like splits, not like classes; {remedy}")
    inner = train / classes[0]
    if len(classes) > 1 or _holds_pictures(inner) or not subfolders(inner):
        return
    while len(below := subfolders(inner)) == 1 and not _holds_pictures(below[0]) and subfolders(below[0]):
        inner = below[0]
    raise ValueError(
        f"{train} has only the class {classes[0]!r}, whose pictures are in sub-folders ({_few([f.name for f in below])}"
        f"); if these are the classes, give the folder above them: {str(inner)!r}; if {classes[0]!r} is a class, move "
        "its pictures into it"
    )


def _holds_pictures(folder: Path) -> bool:
    return any(f.suffix.lower() in SUFFIXES and not f.name.startswith(".") for f in folder.iterdir())


def _class_pictures(
    folder: Path, classes: list[str], part: str, declared: bool, problems: Problems
) -> tuple[list[Path], list[int], int]:
    """Return the picture files of one split, their labels, and the number of other files in its class folders.

    Folders without pictures, unknown folders and broken links are added to `problems`.
    """
    if unknown := [f"{folder.name}/{found.name}" for found in subfolders(folder) if found.name not in classes]:
        kind = "folders that are not in classes; add or move them"
        problems.setdefault(kind if declared else "classes that the training split does not have", []).extend(unknown)
    files: list[Path] = []
    labels: list[int] = []
    others, unread = 0, list[Path]()
    for label, name in enumerate(classes):
        below = _files(folder / name, problems)
        found = [f for f in below if f.suffix.lower() in SUFFIXES]
        if part == "train" and not found and not declared:
            kind = f"missing pictures ({', '.join(SUFFIXES)}) in class folders"
            problems.setdefault(kind, []).append(f"{folder.name}/{name}")
        others += len(below) - len(found)
        unread += [f for f in below if f.suffix.lower() in _UNREAD]
        files += found
        labels += [label] * len(found)
    flat = sum(f.suffix.lower() in SUFFIXES for f in folder.iterdir() if not f.name.startswith("."))
    if not files and not problems:
        content = f"{flat} pictures but no class folders" if flat else "no pictures"
        raise ValueError(
            f"{folder} holds {content}; expected {folder.name}/class/picture.png, or no {folder.name} at all (then a "
            "part of train is held out: test_fraction)"
        )
    if unread:
        warn(f"{len(unread)} files in {folder} are not read, such as {unread[0].name}; convert them to PNG or JPEG")
    if flat:
        warn(f"{flat} pictures in {folder} itself, beside the class folders, are not read")
    if part == "train" and len(inner := _common_subfolders(files, labels, folder)) > 1:
        first = f"{classes[0]!r}: {str(folder / classes[0])!r}"
        warn(
            f"{folder} has the classes {_few(classes)}, and each holds the folders {_few(inner)}; if {_few(classes)} "
            f"are datasets and {_few(inner)} their classes, read one with load_folder({str(folder / classes[0])!r}) or "
            f"all with load_domains({{{first}, ...}})"
        )
    return files, labels, others


def _common_subfolders(files: list[Path], labels: list[int], folder: Path) -> list[str]:
    """Return the names of sub-folders that occur in all class folders.

    If there are such names, each class folder is probably a whole dataset, and the names are its classes. The list is
    empty if any picture is directly in a class folder.
    """
    inside: dict[int, set[str]] = {label: set() for label in labels}
    for file, label in zip(files, labels):
        parts = file.relative_to(folder).parts
        if len(parts) < 3:
            return []
        inside[label].add(parts[1])
    return sorted(set.intersection(*inside.values())) if len(inside) > 1 else []


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _raised(error: OSError) -> None:
    raise error


def _files(folder: Path, problems: Problems) -> list[Path]:
    """Return all files below `folder` whose names do not begin with a dot, sorted."""
    files: list[Path] = []
    if not folder.is_dir():
        return files
    for root, inside, names in os.walk(folder, onerror=_raised):
        inside[:] = [name for name in inside if not name.startswith(".")]
        if links := [name for name in inside if Path(root, name).is_symlink()]:
            warn(f"{root} has links to folders, which are not followed: {', '.join(links)}")
        files += [Path(root, name) for name in names if not name.startswith(".")]
    files.sort()
    if broken := [f"{folder.name}/{file.relative_to(folder)}" for file in files if not file.exists()]:
        problems.setdefault("missing targets of links; repair or delete them", []).extend(broken)
    return files
