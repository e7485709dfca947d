"""Tables of picture files and labels: competitions, hospitals' lists, and what is wrong with them."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from distillkit import Normalization
from distillkit.data import Split, as_domains, load_folder, load_table, open_table
from distillkit.normalization import IDENTITY
from distillkit.privacy import PrivacyError
from distillkit.privacy.validation._arguments import refuse_derived
from tests.pictures import bytes_of, picture, save
from tests.refused import refused
from tests.stored import require_same

HALF = Normalization([0.5], [0.5])
ANIMALS = ["cat", "dog", "cat", "eel", "dog", "cat", "eel", "dog", "cat", "eel", "dog", "eel"]


def competition(path: Path, header: str = "id,breed", names: str = "{:03d}", ending: str = ".png") -> Path:
    """Make `train.csv` with ids without ending, and the folder `train`."""
    for i in range(len(ANIMALS)):
        save(path / "train" / f"{names.format(i)}{ending}", picture(i))
    lines = [f"{names.format(i)},{animal}" for i, animal in enumerate(ANIMALS)]
    (path / "train.csv").write_text("\n".join([header, *lines]), encoding="utf-8")
    return path / "train.csv"


def same(split: Split, labels: list[str] = ANIMALS) -> bool:
    """Return whether every picture of both parts has its label."""
    seen = {}
    for part in split:
        for image, label in zip(part.pixels(), part.labels.tolist()):
            seen[bytes_of(image[None]).tobytes()] = split.classes[label]
    return seen == {picture(i).tobytes(): label for i, label in enumerate(labels)}


def test_a_competition_is_read(tmp_path: Path, global_rng_untouched: None) -> None:
    table = competition(tmp_path)
    (tmp_path / "train" / "000.txt").touch()
    split = load_table(table, folder=tmp_path / "train", normalization=HALF, progress=False)
    assert split.classes == split.train.class_names == ("cat", "dog", "eel")
    assert (len(split.train), len(split.test)) == (9, 3)
    assert same(split)
    assert split.train.info == {
        "dataset": "train", "classes": "labels", "test_fraction": 0.2, "hold_out": "random", "split": "train",
    }  # fmt: skip
    whole = load_table(table, folder=tmp_path / "train", test_fraction=0).train
    assert whole.labels.tolist() == [split.classes.index(animal) for animal in ANIMALS]  # in the order of the rows
    assert not whole.classes_given


FORMS: dict[str, Callable[[Path], Any]] = {
    "csv": lambda path: path,
    "tsv in capitals": lambda path: written(path, ".TSV"),
    "parquet in capitals": lambda path: written(path, ".PARQUET"),
    "frame": lambda path: pd.read_csv(path, dtype=str),
    "mapping": lambda path: UserDict(pd.read_csv(path, dtype=str).to_dict("list")),
}


def written(path: Path, ending: str) -> Path:
    frame, other = pd.read_csv(path, dtype=str), path.with_suffix(ending)
    frame.to_csv(other, sep="\t", index=False) if ending.lower() == ".tsv" else frame.to_parquet(other)
    return other


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_table_give_equal_sets(form: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = FORMS[form](competition(tmp_path, ending=".PNG" if "capitals" in form else ".png"))
    assert same(load_table(table, folder=str(tmp_path / "train"), normalization=HALF))


def test_stored_equals_memory(tmp_path: Path) -> None:
    table = competition(tmp_path)
    options: dict[str, Any] = {"folder": tmp_path / "train", "normalization": HALF, "progress": False}
    cached = partial(open_table, cache=tmp_path / "cache")
    require_same(cached(table, **options), load_table(table, **options))
    for form in ({"size": (4, 3), "channels": 1}, {"hold_out": "content", "test_fraction": 0.4, "user": "breed"}):
        made = cached(table, **options, **form)  # type: ignore[arg-type]
        require_same(made, load_table(table, **options, **form), images="size" not in form)  # type: ignore[arg-type]
        assert made.train.shape == ((1, 4, 3) if "size" in form else (3, 6, 6))
        assert made.test.info["hold_out"] == form.get("hold_out", "random")
    for read in (load_table, partial(cached)):  # type: ignore[assignment]
        twice = {"file": ["000.png", "copy.png"], "label": ["a", "b"]}
        save(tmp_path / "train" / "copy.png", picture(0))
        with pytest.warns(UserWarning, match="1 of 2 images of train are equal to others with another label"):
            read(twice, folder=tmp_path / "train", test_fraction=0)
    refused(lambda: cached(table, **options, workers=0, size=3), ValueError, "workers must be at least 1")
    frame = pd.read_csv(table, dtype=str)
    options |= {"test_fraction": 0}
    orders = (frame, frame[::-1])
    for ordered, found in zip(orders, [cached(one, **options).train for one in orders], strict=True):
        assert torch.equal(found.read().images, load_table(ordered, **options).train.images)
    parts = [cached(frame[i:j], **options).train for i, j in ((0, 7), (7, 12))]
    assert torch.equal(torch.cat([part.read().images for part in parts]), load_table(frame, **options).train.images)


def test_columns_are_found_by_their_names(tmp_path: Path) -> None:
    for header in ("id,breed", "breed,id", "image_id,label", "image,weird", "ID,Kind"):
        table = competition(tmp_path, header)
        first, second = header.split(",")
        frame = pd.read_csv(table, dtype=str, names=[first, second], header=0)
        if first == "breed":
            frame = frame[[second, first]].set_axis([first, second], axis=1)
        assert same(load_table(frame, folder=tmp_path / "train", normalization=HALF))
    wide = pd.DataFrame({"key": [f"{i:03d}.png" for i in range(12)], "b": ANIMALS, "c": ANIMALS[::-1]})
    refused(lambda: load_table(wide), TypeError, 'no column is the image among key, b, c; name it: image="..." or lab')
    refused(lambda: load_table(wide, image="key"), TypeError, "no column is the label among key, b, c")
    twice = pd.concat([wide.set_axis([1, "1", "c"], axis=1), wide], axis=1)
    refused(lambda: load_table(twice), ValueError, "table has several of the name '1'$")
    refused(lambda: load_table(wide, image="nope"), ValueError, "image must be one of .* key, b, c, got 'nope'")
    for name in ("split", "user"):
        wrong: dict[str, Any] = {name: "nope"}
        call = partial(load_table, wide, image="key", label="b", **wrong)
        refused(call, ValueError, f"{name} must be one .*, got 'nope'")
    for wrong in ({"label": ["b", "nope"]}, {"user": "split"}, {"background": 2.0}, {"hold_out": "all"}):
        for read in (load_table, open_table):
            call = partial(read, wide, **{"image": "key", "label": "b", **wrong})
            refused(call, ValueError, f"^{next(iter(wrong))} must be")
    named = wide.set_axis(["key", " 3", 3], axis=1)
    assert same(load_table(named, image="key", label="3", folder=tmp_path / "train", normalization=HALF), ANIMALS[::-1])
    none = partial(load_table, wide, image="key", label="c", folder=tmp_path / "train", classes=[])
    refused(none, ValueError, "12 rows whose label is not in classes: eel, dog, eel")


def test_splits_and_owners(tmp_path: Path) -> None:
    competition(tmp_path)
    parts = ["train", "Training", "VAL", "test"] * 3
    sites = ["north", "south", "eastern"] * 4
    frame = pd.DataFrame({"id": [f"{i:03d}" for i in range(12)], "label": ANIMALS, "split": parts, "site": sites})
    split = load_table(frame, folder=tmp_path / "train", user="site", normalization=HALF)
    assert split.validation is not None
    assert [len(part) for part in (*split, split.validation)] == [6, 3, 3]
    assert split.users == ("eastern", "north", "south")
    owners = [split.users[k] for data in (*split, split.validation) for k in data.columns["user"].tolist()]
    order = [i for names in (("train", "Training"), ("test",), ("VAL",)) for i in range(12) if parts[i] in names]
    assert owners == [sites[i] for i in order]
    assert [split.classes[k] for k in split.test.labels.tolist()] == [ANIMALS[i] for i in order[6:9]]
    assert len(load_table(frame, folder=tmp_path / "train", split=None, test_fraction=0).train) == 12
    moved = load_table(frame.rename(columns={"split": "fold"}), folder=tmp_path / "train", label="label", split="fold")
    assert moved.validation is not None
    assert np.array_equal(bytes_of(moved.test.pixels()), np.stack([picture(i) for i in (3, 7, 11)]))
    one = load_table(frame.assign(site="north"), folder=tmp_path / "train", user="site")
    assert (one.users, one.test.columns["user"].tolist(), one.train.classes_given) == (("north",), [0] * 3, False)
    for column in (None, "split"):
        options: dict[str, Any] = {"folder": tmp_path / "train", "split": column, "normalization": HALF}
        require_same(open_table(frame, **options, cache=tmp_path / "cache"), load_table(frame, **options))
    frame["split"] = "nope"
    words = "one set:\n- 12 rows whose split is none of train, training, .*: nope, nope, nope, ...$"
    refused(lambda: load_table(frame, folder=tmp_path / "train"), ValueError, words)
    frame["split"], frame.loc[0, "label"] = "test", None
    words = "- 1 rows without a label: 000\n- 12 rows of other splits .* column split: 000, 001, 002, ..."
    refused(lambda: load_table(frame, folder=tmp_path / "train"), ValueError, words)


def test_numbers_are_ordered_by_value_and_keep_zeros(tmp_path: Path) -> None:
    competition(tmp_path)
    for labels in (["10", "2", "-3"], [10, 2, -3], [10.0, 2.0, -3.0], ["10", "-2.25", "-2.5"], [10, 2.5, -3]):
        frame = pd.DataFrame({"id": [f"{i:03d}" for i in range(12)], "label": labels * 4})
        split = load_table(frame, folder=tmp_path / "train", test_fraction=0)
        assert split.classes == tuple(str(one).removesuffix(".0") for one in reversed(labels))
        assert split.train.labels.tolist() == [2, 1, 0] * 4
    frame["label"] = [10, 2, 1] * 4
    declared = load_table(frame, folder=tmp_path / "train", classes=[10, 5, 2, 1], test_fraction=0).train  # type: ignore[list-item]
    assert (declared.labels.tolist(), declared.class_names) == ([0, 2, 3] * 4, ("10", "5", "2", "1"))
    assert declared.classes_given
    refuse_derived(declared.info, "data")
    found = load_table(frame, folder=tmp_path / "train", test_fraction=0).train
    refused(lambda: refuse_derived(found.info, "data"), PrivacyError, r"folders or labels that exist.*load_table\(")


def test_several_label_columns_are_rows(tmp_path: Path) -> None:
    competition(tmp_path)
    frame = pd.DataFrame({"id": [f"{i:03d}" for i in range(12)], "a": [1, 0] * 6, "b": [0.25, 1] * 6})
    split = load_table(frame, label=["b", "a"], folder=tmp_path / "train", test_fraction=0)
    assert split.classes == split.train.class_names == ("b", "a")
    assert torch.equal(split.train.labels, torch.tensor([[0.25, 1.0], [1.0, 0.0]] * 6))
    parts = load_table(frame, label=["b", "a"], folder=tmp_path / "train", test_fraction=1 / 3)
    assert sorted(parts.test.labels.tolist()) == [[0.25, 1.0]] * 2 + [[1.0, 0.0]] * 2  # a third of each largest label
    alone = load_table(frame, label=["a"], folder=tmp_path / "train", test_fraction=0).train
    assert (alone.labels.tolist(), alone.class_names) == ([[1.0], [0.0]] * 6, ("a",))
    frame["b"] = frame["b"].astype(object)
    frame.loc[3, "b"] = "x"
    frame["a"] = pd.array([1, None] * 6, dtype="Int64")
    with pytest.raises(ValueError, match="6 rows whose labels are no numbers: 001, 003, 005, ..."):
        load_table(frame, label=["b", "a"], folder=tmp_path / "train")


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    competition(tmp_path)
    train = tmp_path / "train"
    (train / "000.png").write_bytes(b"no picture")
    (train / "001.png").unlink()
    (train / "001.png").mkdir()
    save(train / "002.jpg", picture(2))
    save(train / "006.jpg", picture(6))
    save(train / "003.png", picture(3, 6, 6))
    save(train / "004.png", picture(4, 7, 6, 3))
    labels: list[Any] = [*ANIMALS[:5], None, "fox", *ANIMALS[7:]]
    parts = ["train"] * 7 + ["unknown", None] + ["train"] * 3
    names = [*(f"{i:03d}" for i in range(9)), "008.png", None, None]
    frame = pd.DataFrame({"id": names, "label": labels, "split": parts, "site": ["north"] * 4 + [None] + ["south"] * 7})
    with pytest.raises(ValueError, match="train cannot be read as one set:") as raised:
        load_table(frame, folder=train, classes=["cat", "dog", "eel"], user="site")
    lines = str(raised.value).splitlines()[1:]
    assert {line.split(" of train")[0].split(";")[0] for line in lines} == {
        "- 2 names of several files",
        "- 1 missing pictures: 001",
        "- 1 pictures that cannot be read: 000.png (cannot identify image file)",
        "- 1 pictures without the (6, 6) pixels (height, width) of 002.jpg and 6 more",
        "- 1 pictures without the 3 channels of 002.jpg and 6 more",
        "- 1 rows without a label: 005",
        "- 2 rows without a file: row 10, row 11",
        "- 1 rows without a split: 008",
        "- 1 rows without a user: 004",
        "- 1 rows whose label is not in classes: fox",
        "- 1 rows whose split is none",
        "- 2 pictures in several rows",
    }
    assert any(line.endswith("valid, validation: unknown") for line in lines)
    assert any(line.endswith("; keep one row of each: 008, 008.png") for line in lines)
    refused(lambda: open_table(frame, folder=train, cache=tmp_path / "c"), ValueError, "cannot be read as one set")
    frame.to_csv(train / "t.csv")
    refused(lambda: load_table(train / "t.csv"), ValueError, "- 1 rows without a label: 005")


def test_missing_pictures_name_the_folder_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = competition(tmp_path)
    (tmp_path / "labels").mkdir()
    beside = table.rename(tmp_path / "labels" / table.name)
    monkeypatch.chdir(tmp_path)
    assert same(load_table(beside, folder="train", normalization=HALF))
    words = r"12 missing pictures; pass folder='.*/train', which has .*: 000, 001, 002, \.\.\."
    refused(lambda: load_table(beside), FileNotFoundError, words)
    three = pd.read_csv(beside, dtype=str)[:3].assign(id=["000.png", "001.png", "002.png"])
    refused(lambda: load_table(three, folder=tmp_path / "a" / "b"), FileNotFoundError, ": 000.png, 001.png, 002.png$")
    save(tmp_path / "000.png", picture(0))
    words_of_two = r"2 missing pictures; pass folder='.*/train', which has .*: 001\.png, 002\.png$"
    (tmp_path / "train" / "000.png").unlink()
    refused(lambda: load_table(three, folder=tmp_path), FileNotFoundError, words_of_two)
    (tmp_path / "000.png").rename(tmp_path / "train" / "000.png")
    beside.rename(table)
    beside.parent.rmdir()
    refused(lambda: open_table(table), FileNotFoundError, words)
    words = r"train\.csv, which .*read it with load_table\('/.*/train.csv', folder='.*train'"
    refused(lambda: load_folder(tmp_path), ValueError, words)


def test_classes_that_differ_in_case_are_reported(tmp_path: Path) -> None:
    frame = pd.read_csv(competition(tmp_path), dtype=str)
    label = frame.columns[1]
    frame[label] = ["Cat", "cat", "CAT", "dog", "Dog", "eel"] * 2
    found = ("CAT", "Cat", "Dog", "cat", "dog", "eel")
    for classes, named in ((None, "cat, dog"), (found[::-1], "dog, cat")):
        with pytest.warns(UserWarning, match=f"classes of table that .* are kept apart: {named}$"):
            split = load_table(frame, folder=tmp_path / "train", test_fraction=0, classes=classes)
        assert split.classes == (classes or found)
        assert [split.classes[k] for k in split.train.labels.tolist()] == frame[label].tolist()


def test_what_is_no_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: load_table(tmp_path / "none.csv"), FileNotFoundError, r"no file .*none\.csv; expected a \.csv")
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.csv").write_text("", encoding="utf-8")
    (tmp_path / "c.csv").write_text("id,label\n", encoding="utf-8")
    (tmp_path / "d.parquet").write_text("id", encoding="utf-8")
    said = {"a.csv": "damaged or no", "b.csv": "no table", "c.csv": "c has no rows", "d.parquet": "no table"}
    for name, words in said.items():
        refused(lambda name=name: load_table(tmp_path / name), ValueError, words)
    for held in ({"bytes": b"", "path": None}, b""):
        call = partial(load_table, {"image": [held], "label": [0]})
        refused(call, TypeError, r"holds pictures, not files; read it with as_set\(pandas")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(lambda: load_table(tmp_path / "d.parquet"), ImportError, r"d\.parquet needs pyarrow: .*kit\[data\]'")
    monkeypatch.setitem(sys.modules, "pandas", None)
    refused(lambda: load_table(tmp_path / "c.csv"), ImportError, r"load_table needs pandas: .*'distillkit\[data\]'")


def test_full_names_beat_names_without_ending_and_words_for_nothing_are_labels(tmp_path: Path) -> None:
    names = ("a.png", "c/b.jpg", "b.jpg", "a.png.jpg")
    for number, name in enumerate(names):
        save(tmp_path / name, picture(number))
    (tmp_path / "t.csv").write_text("file,label\na.png ,NA\nc/b,NA\nb, None \n", encoding="utf-8")
    split = load_table(tmp_path / "t.csv", test_fraction=0, normalization=IDENTITY)
    assert split.classes == ("NA", "None")
    assert np.array_equal(bytes_of(split.train.images), np.stack([picture(number) for number in range(3)]))
    save(tmp_path / "c" / "b.png", picture(4))
    refused(lambda: load_table(tmp_path / "t.csv"), ValueError, "1 names of several files; add the ending: c/b$")


def test_joined_tables_keep_the_origin_of_their_classes(tmp_path: Path) -> None:
    split = load_table(competition(tmp_path), folder=tmp_path / "train", test_fraction=0)
    joined = as_domains({"north": split, "south": split})
    assert (joined.train.info["classes"], joined.train.class_names) == ("labels", split.classes)
    folders, rows = (
        Split(*(part.replace(info={**part.info, "classes": origin}) for part in split), split.classes)
        for origin in ("folders", "dataset")
    )
    for first, second, origin in ((split, folders, "labels"), (folders, split, "folders"), (rows, split, "labels")):
        assert as_domains({"north": first, "south": second}).train.info["classes"] == origin
    declared = as_domains({"north": split}, classes=split.classes)
    assert "classes" not in declared.train.info
