"""Tiny-ImageNet: 200 classes of ImageNet at 64x64."""

from __future__ import annotations

from pathlib import Path

import torch

from distillkit.data.readers._listing import Listing, require
from distillkit.data.readers.folder_layout import SUFFIXES

__all__ = ["FOLDER", "NAME", "list_tiny_imagenet"]

NAME = "tinyimagenet"
FOLDER = "tiny-imagenet-200"
_SOURCE = "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip there, as it is"


def list_tiny_imagenet(folder: Path) -> Listing:
    """Which pictures an unpacked `tiny-imagenet-200` has; its `val` is the test set, as its `test` has no labels.

    Args:
        folder: with `wnids.txt` (the classes), `words.txt` (their names), `train/<wnid>/images/*.JPEG`,
            `val/images/*.JPEG` and `val/val_annotations.txt` (a picture, its class and a box a line, with tabs).

    Labels follow the sorted class ids, as ImageFolder has them.

    Raises:
        FileNotFoundError: what is missing, named.
        ValueError: a file of another layout.
    """
    require(folder, ["wnids.txt", "words.txt", "train", "val/val_annotations.txt", "val/images"], NAME, _SOURCE)
    ids = sorted((folder / "wnids.txt").read_text().split())
    words = dict(line.partition("\t")[::2] for line in (folder / "words.txt").read_text().splitlines())
    if not ids or (unnamed := [wnid for wnid in ids if wnid not in words]):
        lacking = ", ".join(unnamed[:5]) if ids else "all"
        raise ValueError(f"{folder / 'words.txt'} must name each class of wnids.txt, but lacks {lacking}; {_SOURCE}")
    require(folder, [f"train/{wnid}/images" for wnid in ids], NAME, _SOURCE)
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
    for line in annotations.read_text().splitlines():
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in number:
            raise ValueError(f"{annotations} must hold lines picture<tab>class<tab>box, got {line!r}")
        files["test"].append(folder / "val" / "images" / name)
        labels["test"].append(number[wnid])
    if not files["test"]:
        raise ValueError(f"{annotations} names no pictures; {_SOURCE}")
    require(folder / "val" / "images", [file.name for file in files["test"]], NAME, _SOURCE)
    return Listing(
        files,
        {part: torch.tensor(own, dtype=torch.long) for part, own in labels.items()},
        tuple(words[wnid] for wnid in ids),
        {"dataset": NAME},
    )
