"""Reader of Tiny-ImageNet: 200 classes of ImageNet at 64x64 pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distillkit.data.readers._folder_layout import SUFFIXES
from distillkit.data.readers._picture_list import PictureList, open_picture_list, read_picture_list, require_files
from distillkit.data.split import Split, StoredSplit

__all__ = ["load_tiny_imagenet", "open_tiny_imagenet"]

_NAME = "tinyimagenet"
_SOURCE = "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip there, as it is"


def load_tiny_imagenet(path: Path, *, channels: int = 3, **options: Any) -> Split:
    """Load Tiny-ImageNet from the unpacked release. Its `val` is used as test set, because its `test` has no labels.

    Args:
        path: the folder `tiny-imagenet-200` with `wnids.txt` (the classes), `words.txt` (their names),
            `train/<wnid>/images/*.JPEG`, `val/images/*.JPEG` and `val/val_annotations.txt` (tab-separated lines with a
            picture's name, its class and a bounding box).
        channels: 3 to repeat gray pictures as RGB, or 1 to convert all pictures to gray.
        options: the options `size` and `normalization` of `load`.

    Labels are indices into the sorted class ids, as in torchvision's `ImageFolder`.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: the folder has another layout.
    """
    return read_picture_list(_list(path), channels=channels, **options)


def open_tiny_imagenet(path: Path, *, channels: int = 3, **options: Any) -> StoredSplit:
    """Open Tiny-ImageNet, like `load_tiny_imagenet`, but read pictures only when they are needed.

    Args:
        path, channels: as in `load_tiny_imagenet`.
        options: further options of `open_picture_list`.
    """
    return open_picture_list(_list(path), path, channels=channels, **options)


def _list(folder: Path) -> PictureList:
    require_files(folder, ["wnids.txt", "words.txt", "train", "val/val_annotations.txt", "val/images"], _NAME, _SOURCE)
    ids = sorted((folder / "wnids.txt").read_text(encoding="utf-8").split())
    words = dict(line.partition("\t")[::2] for line in (folder / "words.txt").read_text(encoding="utf-8").splitlines())
    if not ids or (unnamed := [wnid for wnid in ids if wnid not in words]):
        lacking = ", ".join(unnamed[:5]) if ids else "all"
        raise ValueError(f"{folder / 'words.txt'} must name each class of wnids.txt, but lacks {lacking}; {_SOURCE}")
    require_files(folder, [f"train/{wnid}/images" for wnid in ids], _NAME, _SOURCE)
    files: dict[str, list[Path]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for label, wnid in enumerate(ids):
        found = sorted(f for f in (folder / "train" / wnid / "images").iterdir() if f.suffix.lower() in SUFFIXES)
        if not found:
            raise FileNotFoundError(f"{folder / 'train' / wnid / 'images'} holds no pictures; {_SOURCE}")
        files["train"] += found
        labels["train"] += [label] * len(found)
    number = {wnid: label for label, wnid in enumerate(ids)}
    annotations = folder / "val" / "val_annotations.txt"
    for line in annotations.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in number:
            raise ValueError(f"{annotations} must hold lines picture<tab>class<tab>box, got {line!r}")
        files["test"].append(folder / "val" / "images" / name)
        labels["test"].append(number[wnid])
    if not files["test"]:
        raise ValueError(f"{annotations} names no pictures; {_SOURCE}")
    require_files(folder / "val" / "images", [file.name for file in files["test"]], _NAME, _SOURCE)
    rows = {part: torch.tensor(own, dtype=torch.long) for part, own in labels.items()}
    return PictureList(files, rows, tuple(words[wnid] for wnid in ids), {"dataset": _NAME})
