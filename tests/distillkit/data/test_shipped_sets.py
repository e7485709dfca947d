"""Shipped sets load by name, their cards are complete, and sets of real images contain no images."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distillkit import LabeledImages
from distillkit._utils.files import read_tensors, write_tensors
from distillkit.data import load, load_set, set_cards, set_files
from distillkit.training import Protocol
from tests.refused import refused

ROOT = Path(__file__).parents[3]
PACKAGED = sorted((ROOT / "distillkit" / "data" / "shipped").glob("*"))
FIELDS = {
    "accuracy", "architecture", "command", "commit", "dataset", "epsilon", "leak", "licence", "method", "options",
    "protocol", "settings", "teacher",
}  # fmt: skip
LOCAL = [name for name, card in set_cards().items() if card["dataset"] == "digits"]
"""Sets whose dataset needs no files."""


def test_sets_are_small() -> None:
    assert 0 < sum(path.stat().st_size for path in PACKAGED) <= 5_000_000
    assert {path.suffix for path in PACKAGED} == {".safetensors"}


def test_cards_are_complete() -> None:
    cards = set_cards()
    assert {path.stem for path in PACKAGED} == set(cards)
    for name, card in cards.items():
        assert set(card) == FIELDS, name
        assert card["licence"], name
        method, ipc = name.removeprefix(f"{card['dataset']}-").rsplit("-", 1)
        assert f"--methods {method} --ipc {ipc} " in card["command"], name
        assert set(card["accuracy"]) == {"hard", "row", "view"}, name
        assert all(0 < accuracy <= 1 for accuracy in (card["teacher"], *card["accuracy"].values())), name
        assert (card["epsilon"] is not None) == method.startswith("class-means"), name
        assert set(card["leak"]) == {"copies", "within_25_db"}, name
        Protocol(**{key: value for key, value in card["protocol"].items() if key != "augment"})


@pytest.mark.parametrize("name", LOCAL)
def test_a_set_has_its_card_and_the_classes_of_its_dataset(name: str) -> None:
    small, card = load_set(name), set_cards()[name]
    assert small.info["card"] == card
    split = load(card["dataset"], **card["options"])
    small.require_compatible(split.test)
    assert small.class_names == split.classes
    flat, records = small.pixels().flatten(1), split.train.pixels().flatten(1)
    copies = (torch.cdist(flat, records).amin(1) < 1e-3).double().mean()
    assert card["leak"]["copies"] == pytest.approx(float(copies))


def test_files_that_copy_training_images_have_no_images() -> None:
    for path in PACKAGED:
        copies = set_cards()[path.stem]["leak"]["copies"]
        assert (set(load_file(path)) == {"indices", "labels"}) == (copies > 0), path.stem


def test_rows_of_other_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(path for path in PACKAGED if path.stem == "digits-random-10")
    facts = set_files._facts(source)
    monkeypatch.setattr(set_files, "_FOLDER", tmp_path)
    tensors = read_tensors(source, kind="distillkit.ImageIndex/1", content="rows")[0]
    rows, labels = tensors["indices"], tensors["labels"]
    assert len(labels[:10].unique()) == 1
    orders = ([1, 1, *range(2, 10)], [0, 0, *range(2, 10)], [*range(10)][::-1])  # other images of one class, or order
    others = {name: {"indices": torch.cat([rows[order], rows[10:]])} for name, order in zip("bde", orders)}
    others |= {"a": {}, "c": {"labels": labels.roll(1)}}
    for name, changed in others.items():
        text = {"format": "distillkit.ImageIndex/1", "set": json.dumps(facts)}
        write_tensors(tmp_path / f"{name}.safetensors", {**tensors, **changed}, text)
    asked: list[Any] = []
    monkeypatch.setattr(set_files, "load", lambda name, root, **options: asked.append(root) or load(name, **options))
    assert (load_set("a", root="here").info, asked) == (facts["info"], ["here"])
    for name in "bcde":
        refused(partial(load_set, name), ValueError, f"images of digits to which {name} refers have changed since")


def test_a_folder_with_the_name_of_a_shipped_set_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(LabeledImages.load(load_set("digits-dm-1").export("digits-dm-10"))) == len(load_set("digits-dm-10"))
