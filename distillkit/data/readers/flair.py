"""Reader of FLAIR: photos that Flickr users uploaded. Each photo has several labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch

from distillkit._utils import check
from distillkit.data.readers._picture_list import (
    PictureList,
    require_files,
    require_pictures,
    user_picture_list,
)

_METADATA, _IMAGES = "labels_and_metadata.json", "small_images"
_PARTS = {"train": "train", "val": "validation", "dev": "validation", "test": "test"}
_KINDS = {"coarse": "labels", "fine": "fine_grained_labels"}
_SOURCE = "get it with download_dataset.py of https://github.com/apple/ml-flair"


def list_flair(folder: Path, labels: Literal["coarse", "fine"] = "coarse") -> PictureList:
    """List the photos of FLAIR (Song et al., NeurIPS 2022). Each photo has several labels and a Flickr user.

    There are 429,078 photos of 51,414 users. The authors' training, validation and test sets have different users.

    Args:
        folder: the output folder of FLAIR's `download_dataset.py`, with `labels_and_metadata.json` (a list of objects
            with `user_id`, `image_id`, `labels`, `fine_grained_labels` and `partition`) and `small_images/*.jpg`.
        labels: "coarse" for the 17 categories, or "fine" for the 1,628 labels within these categories.

    Returns:
        A listing with multi-label rows of 0 and 1. Its `classes` are all labels that occur in the file, sorted as in
        the authors' scripts. Its `users` are the sorted names of all users.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: a file is damaged, or has another layout.
    """
    key = _KINDS[check.one_of(labels, "labels", tuple(_KINDS))]
    require_files(folder, [_METADATA, _IMAGES], "flair", _SOURCE)
    try:
        records = json.loads((folder / _METADATA).read_bytes())
    except ValueError as error:
        raise ValueError(f"{folder / _METADATA} is damaged: {error}; {_SOURCE}") from error
    if not isinstance(records, list):
        raise ValueError(f"{folder / _METADATA} must hold a list of objects, got a {type(records).__name__}; {_SOURCE}")
    for index, record in enumerate(records):
        if not _is_record(record, key):
            raise ValueError(
                f"{folder / _METADATA}: object {index} must have user_id and image_id (text), {key} (a list of text) "
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
        entries = [(i, number[label]) for i, record in enumerate(own) for label in record[key]]
        if entries:
            rows[part][tuple(torch.tensor(entries).T)] = 1.0
    owners = {part: [record["user_id"] for record in own] for part, own in by_part.items()}
    users = sorted({user for own in owners.values() for user in own})
    names = {part: [f"{record['image_id']}.jpg" for record in own] for part, own in by_part.items()}
    return user_picture_list("flair", require_pictures(folder / _IMAGES, names, _SOURCE), rows, classes, owners, users)


def _is_record(record: Any, key: str) -> bool:
    if not isinstance(record, dict) or not all(isinstance(record.get(k), str) for k in ("user_id", "image_id")):
        return False
    own = record.get(key)
    return isinstance(own, list) and all(isinstance(label, str) for label in own) and record.get("partition") in _PARTS
