from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distillkit import Normalization
from distillkit.data import DATASETS, clients, partition
from tests.pictures import Array, bytes_of, picture, save
from tests.refused import refused

load_flair = DATASETS["flair"].load
HALF = Normalization([0.5], [0.5])


def record(photo: int, user: str, part: str, coarse: list[str], fine: list[str]) -> dict[str, Any]:
    return {"user_id": user, "image_id": str(photo), "fine_grained_labels": fine, "labels": coarse, "partition": part}


RECORDS = [
    record(14, "b@N00", "train", ["equipment", "structure"], ["bag", "furniture"]),
    record(11, "a@N01", "train", ["plant", "plant"], ["tree"]),
    record(12, "b@N00", "train", [], []),
    record(13, "d@N00", "val", ["food"], ["bread", "fruit"]),
    record(15, "C@N02", "test", ["plant", "food"], ["tree", "fruit"]),
]


def photo(number: int) -> Array:
    return picture(number, *((6, 6) if number == 11 else (6, 6, 3)))


def write(folder: Path, records: Any = RECORDS) -> Path:
    for number in range(11, 16):  # one of them is grey
        save(folder / "small_images" / f"{number}.jpg", photo(number))
    (folder / "labels_and_metadata.json").write_text(json.dumps(records), encoding="utf-8")
    return folder


def test_photos_labels_and_users(tmp_path: Path, global_rng_untouched: None) -> None:
    split = load_flair(write(tmp_path), size=6, normalization=HALF)
    assert split.classes == ("equipment", "food", "plant", "structure")
    assert split.users == ("C@N02", "a@N01", "b@N00", "d@N00")
    assert split.validation is not None
    assert split.train.labels.tolist() == [[1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert split.validation.labels.tolist() == [[0, 1, 0, 0]]
    assert [data.columns["user"].tolist() for data in (*split, split.validation)] == [[2, 1, 2], [0], [3]]
    stored = bytes_of(split.train.pixels())
    assert np.array_equal(stored[0], photo(14))
    assert np.array_equal(stored[1], np.repeat(photo(11)[..., None], 3, 2))
    assert split.test.info == {"dataset": "flair", "split": "test"}
    own = clients(split.train, partition.by_domain(split.train.columns["user"]))
    assert [len(mine) for mine in own] == [1, 2]


def test_fine_labels_and_the_other_name_of_the_validation_set(tmp_path: Path) -> None:
    other = {"partition": "dev", "fine_grained_labels": []}
    records = [{**r, **other} if r["partition"] == "val" else r for r in RECORDS]
    split = load_flair(write(tmp_path, records), size=2, labels="fine", normalization=HALF)
    assert split.classes == ("bag", "fruit", "furniture", "tree")
    assert split.test.labels.tolist() == [[0, 1, 0, 1]]
    assert split.validation is not None
    assert split.validation.labels.tolist() == [[0, 0, 0, 0]]


def test_missing_files_are_named(tmp_path: Path) -> None:
    refused(lambda: load_flair(tmp_path, size=6), FileNotFoundError, "missing labels_and_metadata.json, small_images;")
    write(tmp_path / "flair")
    (tmp_path / "flair" / "small_images" / "15.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"small_images lacks 1 pictures, such as 15\.jpg; get it with"):
        load_flair(tmp_path / "flair", size=6)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ({"a": 1}, "must hold a list of objects, got a dict"),
        ([*RECORDS, {**RECORDS[0], "user_id": 5}], "object 5 must have user_id and image_id.*, got {'user_id': 5"),
        ([*RECORDS, {**RECORDS[0], "image_id": 5}], "object 5 must have"),
        ([*RECORDS, {**RECORDS[0], "labels": ["plant", 5]}], "object 5 must have"),
        ([*RECORDS, {**RECORDS[0], "partition": "train2"}], "object 5 .* partition .one of train, val, dev, test"),
        ([{**RECORDS[0], "labels": "plant"}, *RECORDS], "object 0 must have"),
        ([*RECORDS, {"user_id": "a", "image_id": "1", "labels": []}], "object 5 must have"),
        ([*RECORDS, 7], "object 5 must have"),
        (RECORDS[:3], "has no photos of test, validation"),
        ([{**r, "labels": []} for r in RECORDS], "has no labels at all"),
    ],
)
def test_metadata_of_another_layout_are_refused(records: Any, words: str, tmp_path: Path) -> None:
    refused(lambda: load_flair(write(tmp_path, records), size=6), ValueError, words)


def test_damaged_metadata_and_invalid_options_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path) / "labels_and_metadata.json"
    refused(lambda: load_flair(tmp_path, size=6, labels="all"), ValueError, "labels must be one of 'coarse', 'fine'")
    whole = file.read_bytes()
    for damaged in (whole[:-5], whole.replace(b"plant", b"pl\xe4nt"), b""):  # Latin-1 is not UTF-8
        file.write_bytes(damaged)
        words = f"^{re.escape(str(file))} is damaged: .*; get it with"
        refused(lambda: load_flair(tmp_path, size=6), ValueError, words)


def test_too_many_photos_for_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(os, "sysconf", lambda name: 20)
    refused(lambda: load_flair(tmp_path, size=6), ValueError, r"^5 pictures of .*; use open_dataset\(\.\.\.\), wh")
