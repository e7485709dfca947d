from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distillkit import Normalization
from distillkit.data import DATASETS, clients, load, open_dataset, partition
from tests.pictures import Array, bytes_of, picture, save
from tests.refused import refused
from tests.stored import require_same

load_celeba, load_leaf_celeba = DATASETS["celeba"].load, DATASETS["leaf-celeba"].load
HALF = Normalization([0.5], [0.5])
PEOPLE = {1: "2880", 2: "12", 3: "2880", 4: "7", 5: "99", 6: "99", 7: "99"}
PART = {1: 0, 2: 0, 3: 0, 4: 1, 5: 2, 6: 2, 7: 2}
BLOND, SMILING = {2, 5}, {1, 6}


def face(number: int) -> Array:
    return picture(number, 8, 6, 3)


def pictures(folder: Path) -> None:
    for number in PEOPLE:
        save(folder / f"{number:06d}.jpg", face(number))


def write(folder: Path) -> Path:
    pictures(folder / "img_align_celeba")
    sign = {True: " 1", False: "-1"}
    rows = [f"{n:06d}.jpg {sign[n in BLOND]} {sign[n in SMILING]}" for n in PEOPLE]
    text = "\n".join([str(len(PEOPLE)), "Blond_Hair Smiling ", *rows]) + "\n"
    (folder / "list_attr_celeba.txt").write_text(text, encoding="utf-8")
    for name, table in (("identity_CelebA.txt", {**PEOPLE, 8: "5"}), ("list_eval_partition.txt", PART)):
        (folder / name).write_text("".join(f"{n:06d}.jpg {value}\n" for n, value in table.items()), encoding="utf-8")
    return folder


def test_faces_labels_and_people(tmp_path: Path, global_rng_untouched: None) -> None:
    split = load_celeba(write(tmp_path / "celeba"), size=(8, 6), normalization=HALF)
    assert split.classes == DATASETS["celeba"].classes == ("not Smiling", "Smiling")
    assert split.users == ("7", "12", "99", "2880")
    assert split.validation is not None
    for part, data in enumerate((split.train, split.validation, split.test)):
        numbers = [n for n in PEOPLE if PART[n] == part]
        stored = bytes_of(data.pixels())
        assert np.array_equal(stored, np.stack([face(n) for n in numbers]))
        assert data.labels.tolist() == [int(n in SMILING) for n in numbers]
        assert [split.users[k] for k in data.columns["user"].tolist()] == [PEOPLE[n] for n in numbers]
    assert split.train.info == {"dataset": "celeba", "split": "train"}
    people = clients(split.train, partition.by_domain(split.train.columns["user"]))
    assert [mine.labels.tolist() for mine in people] == [[0], [1, 0]]


def test_several_attributes_are_rows_and_84_pixels_the_default(tmp_path: Path) -> None:
    split = load_celeba(write(tmp_path), attributes=["Smiling", "Blond_Hair"], normalization=HALF, channels=1)
    assert split.train.shape == (1, 84, 84)
    assert split.classes == ("Smiling", "Blond_Hair")
    assert split.train.labels.tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    assert load_celeba(tmp_path, attributes=["Smiling"], size=2).train.labels.tolist() == [[1.0], [0.0], [0.0]]
    assert load_celeba(tmp_path, attributes="Blond_Hair", size=2, normalization=HALF).test.labels.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("identity_CelebA.txt", ("2880", "anna"), "must hold each picture once, with 1 times a number, got '000001"),
        ("identity_CelebA.txt", ("000002.jpg", "000001.jpg"), "must hold each picture once"),
        ("identity_CelebA.txt", ("000002.jpg", "000009.jpg"), "CelebA.txt lacks 1 pictures of .*, such as 000002"),
        ("identity_CelebA.txt", ("2880", "2880 5"), "with 1 times a number, got '000001.jpg 2880 5'"),
        ("identity_CelebA.txt", ("000001.jpg 2880", ""), "with 1 times a number, got ''"),
        ("list_attr_celeba.txt", ("\n", " "), "attributes must be one of"),
        ("list_attr_celeba.txt", ("-1", "0"), "with 2 times one of 1, -1"),
        ("list_attr_celeba.txt", ("000002.jpg", "000009.jpg"), "attr_celeba.txt lacks 1 pictures .*, such as 000002"),
        ("list_eval_partition.txt", (" 1\n", " 3\n"), "must hold .* one of 0, 1, 2, got '000004.jpg 3'"),
        ("list_eval_partition.txt", (" 1\n", " 2\n"), "has no pictures of validation"),
    ],
)
def test_tables_of_another_layout_are_refused(file: str, change: tuple[str, str], words: str, tmp_path: Path) -> None:
    path = write(tmp_path) / file
    path.write_text(path.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    refused(lambda: load_celeba(tmp_path), ValueError, words)


def test_invalid_attributes_are_refused(tmp_path: Path) -> None:
    load = partial(load_celeba, write(tmp_path))
    refused(lambda: load(attributes="Happy"), ValueError, "attributes must be one of 'Blond_Hair', 'Smiling'")
    for repeated in ([], ["Smiling"] * 2):
        refused(partial(load, attributes=repeated), ValueError, "attributes must be distinct, at least one, got")


def leaf(folder: Path, **change: Any) -> Path:
    """Write the files of LEAF's `metadata_to_json.py` and `split_data.py`: names, and y as floats."""
    for part, numbers in (("train", [1, 2, 5, 6]), ("test", [3, 4, 7])):
        held: dict[str, Any] = {}
        for n in numbers:
            own = held.setdefault(PEOPLE[n], {"x": [], "y": []})
            own["x"].append(f"{n:06d}.jpg")
            own["y"].append(float(n in SMILING))
        if change and part == "train":
            held["99"].update(change)
        whole = {"users": list(held), "num_samples": [len(own["y"]) for own in held.values()], "user_data": held}
        (folder / part).mkdir(parents=True)
        (folder / part / f"all_data_niid_1_keep_5_{part}_9.json").write_text(json.dumps(whole), encoding="utf-8")
    return folder


def test_leafs_faces_and_people(tmp_path: Path, global_rng_untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pictures(leaf(tmp_path) / "raw" / "img_align_celeba")
    split = load_leaf_celeba(tmp_path, size=(8, 6), normalization=HALF)
    assert split.users == ("7", "12", "99", "2880")
    assert split.classes == ("not Smiling", "Smiling")
    assert split.test.info == {"dataset": "leaf-celeba", "split": "test"}
    assert [part.columns["user"].tolist() for part in split] == [[3, 1, 2, 2], [3, 0, 2]]
    assert split.train.labels.tolist() == [1, 0, 0, 1]
    stored = bytes_of(split.test.pixels())
    assert np.array_equal(stored, np.stack([face(3), face(4), face(7)]))
    (tmp_path / "raw").rename(tmp_path / "elsewhere")
    moved = load_leaf_celeba(tmp_path, images="~/elsewhere/img_align_celeba", normalization=HALF)
    assert moved.train.shape == (3, 84, 84)


def test_leaf_without_files_or_faces_is_refused(tmp_path: Path) -> None:
    refused(lambda: load_leaf_celeba(tmp_path), FileNotFoundError, r"lacks train/\*\.json and test/.*; make them with")
    refused(lambda: load_leaf_celeba(leaf(tmp_path)), FileNotFoundError, r"raw/.* lacks 7 .*, such as 000001\.jpg")


@pytest.mark.parametrize(
    "change",
    [
        *({"y": [0.0, wrong]} for wrong in (2.0, 0.5, "yes", {})),
        *({"x": wrong} for wrong in (["000005.jpg", 2], ["000005.jpg"], ["000005.jpg"] * 3)),
        {"z": []},
    ],
)
def test_leafs_files_of_another_layout_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"user '99' must have as many names of pictures x and labels y \(0 or 1\)"):
        load_leaf_celeba(leaf(tmp_path, **change))


def test_celeba_by_name(tmp_path: Path) -> None:
    write(tmp_path / "celeba")
    options: dict[str, Any] = {"root": tmp_path, "size": (8, 6), "normalization": HALF, "progress": False}
    assert load("celeba", **options).train.labels.tolist() == [1, 0, 0]
    split = load("celeba", **options, attributes="Blond_Hair")
    assert split.train.labels.tolist() == [0, 1, 0]
    require_same(open_dataset("CelebA", **options, attributes="Blond_Hair", cache=tmp_path / "cache"), split)
    for name, words in (
        ("CelebA", "images is no option of celeba; its own options: attributes, progress$"),
        ("mnist", "images is no option of mnist; its own options: none$"),
    ):
        refused(lambda name=name: load(name, root=tmp_path, images="x", labels="y"), TypeError, words)  # type: ignore[misc]
