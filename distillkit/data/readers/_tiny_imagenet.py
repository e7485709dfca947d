"""Reader of Tiny-ImageNet: 200 classes of ImageNet at 64x64 pixels."""

from __future__ import annotations

from pathlib import Path

import torch

from distillkit.data.readers._folder_layout import SUFFIXES
from distillkit.data.readers._picture_list import PictureList, require_files

_NAME = "tinyimagenet"
_SOURCE = "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip there, as it is"


def list_tiny_imagenet(folder: Path) -> PictureList:
    """List the pictures of the unpacked release. Its `val` is used as test set, because its `test` has no labels.

    Args:
        folder: the folder `tiny-imagenet-200` with `wnids.txt` (the classes), `words.txt` (their names),
            `train/<wnid>/images/*.JPEG`, `val/images/*.JPEG` and `val/val_annotations.txt` (tab-separated lines with a
            picture's name, its class and a bounding box).

    Labels are indices into the sorted class ids, as in torchvision's `ImageFolder`.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: the folder has another layout.
    """
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
