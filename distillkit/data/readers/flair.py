"""FLAIR: photos of Flickr users with many labels each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import torch

from distillkit._utils import check
from distillkit.data.readers._listing import Listing, columns_of, pictures_in, read_listing, require
from distillkit.data.readers.folder import Size
from distillkit.data.split import Split
from distillkit.normalization import Normalization

__all__ = ["list_flair", "load_flair"]

_METADATA, _IMAGES = "labels_and_metadata.json", "small_images"
_PARTS = {"train": "train", "val": "validation", "dev": "validation", "test": "test"}
_KINDS = {"coarse": "labels", "fine": "fine_grained_labels"}
_SOURCE = "get it with download_dataset.py of https://github.com/apple/ml-flair"


def load_flair(
    path: str | os.PathLike[str],
    *,
    size: Size,
    labels: Literal["coarse", "fine"] = "coarse",
    channels: int = 3,
    normalization: Normalization | None = None,
    progress: bool = True,
) -> Split:
    """Load FLAIR (Song et al., NeurIPS 2022) from its authors' files: photos with several labels each, by user.

    For multi-label tasks over clients that are real people: 429,078 photos of 51,414 users, whom the column `user`
    numbers. The authors' training, validation and test sets have different users.

    Args:
        path: the folder that FLAIR's `download_dataset.py` fills, with `labels_and_metadata.json` (a list of objects
            with `user_id`, `image_id`, `labels`, `fine_grained_labels` and `partition`) and `small_images/*.jpg`.
        size: height and width in pixels that the 256x256 photos are resized to. All of them are 5 GB of float32 at 32,
            21 GB at 64.
        labels: "coarse", the 17 categories, or "fine", the 1,628 labels below them.
        channels: 1 or 3; see `load_folder`.
        normalization: default the mean and standard deviation measured on the training split.
        progress: whether long reading shows a bar.

    Returns:
        A `Split` with `validation` and label rows of 0 and 1. `classes` are the labels that occur anywhere in the
        file, sorted, as the authors' own scripts number them; `users` are all users' names, sorted.

    Raises:
        FileNotFoundError: what is missing, named.
        ValueError: a file that is damaged or not of that layout.
    """
    kind = check.one_of(labels, "labels", tuple(_KINDS))
    return read_listing(list_flair(Path(path).expanduser(), kind), size, channels, normalization, progress)


def list_flair(folder: Path, labels: str) -> Listing:
    """Which photos FLAIR has, apart from reading them.

    Args:
        folder, labels: see `load_flair`.

    Raises:
        FileNotFoundError, ValueError: see `load_flair`.
    """
    require(folder, [_METADATA, _IMAGES], "flair", _SOURCE)
    try:
        records = json.loads((folder / _METADATA).read_bytes())
    except ValueError as error:
        raise ValueError(f"{folder / _METADATA} is damaged: {error}; {_SOURCE}") from error
    if not isinstance(records, list):
        raise ValueError(f"{folder / _METADATA} must hold a list of objects, got a {type(records).__name__}; {_SOURCE}")
    key = _KINDS[labels]
    for place, record in enumerate(records):
        if not _is_record(record, key):
            raise ValueError(
                f"{folder / _METADATA}: object {place} must have user_id and image_id (text), {key} (a list of text) "
                f"and partition (one of {', '.join(_PARTS)}), got {str(record)[:200]}; {_SOURCE}"
            )
    by_part: dict[str, list[dict[str, Any]]] = {"train": [], "test": [], "validation": []}
    for record in records:
        by_part[_PARTS[record["partition"]]].append(record)
    if empty := [part for part, own in by_part.items() if not own]:
        raise ValueError(f"{folder / _METADATA} has no photos of {', '.join(empty)}; {_SOURCE}")
    classes = sorted({label for record in records for label in record[key]})
    if not classes:
        raise ValueError(f"{folder / _METADATA} has no {key} at all; {_SOURCE}")
    number = {label: k for k, label in enumerate(classes)}
    rows = {}
    for part, own in by_part.items():
        rows[part] = torch.zeros(len(own), len(classes))
        places = [(i, number[label]) for i, record in enumerate(own) for label in record[key]]
        if places:
            rows[part][tuple(torch.tensor(places).T)] = 1.0
    owners = {part: [record["user_id"] for record in own] for part, own in by_part.items()}
    users = sorted({user for own in owners.values() for user in own})
    names = {part: [f"{record['image_id']}.jpg" for record in own] for part, own in by_part.items()}
    files = pictures_in(folder / _IMAGES, names, _SOURCE)
    return Listing(files, rows, tuple(classes), {"dataset": "flair"}, columns_of(owners, users), tuple(users))


def _is_record(record: Any, key: str) -> bool:
    if not isinstance(record, dict) or not all(isinstance(record.get(k), str) for k in ("user_id", "image_id")):
        return False
    own = record.get(key)
    return isinstance(own, list) and all(isinstance(label, str) for label in own) and record.get("partition") in _PARTS
