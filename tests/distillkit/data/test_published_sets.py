"""Sets in the layout of Hugging Face: a folder with a card, its pictures, and the set without loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import yaml
from click.testing import CliRunner

from distillkit import LabeledImages
from distillkit.commands import main
from distillkit.data import load_set, set_cards
from tests.refused import refused
from tests.stored import require_same_set


def publish(name: str, folder: Path, code: int = 0) -> str:
    found = CliRunner().invoke(main, ["sets", name, "--out", str(folder), "--card", "--quiet"])
    assert found.exit_code == code, found.output
    return found.output


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "digits-dm-1"
    said = publish("digits-dm-1", folder)
    assert "leave out" not in said
    return folder


def test_folder_is_read_without_loss(published: Path) -> None:
    require_same_set(load_set(published), load_set("digits-dm-1"))
    pictures = LabeledImages.load(published)
    assert pictures.labels.equal(load_set("digits-dm-1").labels)
    assert not pictures.images.equal(load_set("digits-dm-1").images)
    refused(lambda: load_set(published, logits=True), TypeError, "logits must be left out")


def test_tiles_stay_tiles(tmp_path: Path) -> None:
    publish("digits-dm-tiles-1", tmp_path / "tiles")
    require_same_set(load_set(tmp_path / "tiles"), load_set("digits-dm-tiles-1"))


def test_card_has_the_metadata_of_the_hub_and_the_facts(published: Path) -> None:
    _, front, text = (published / "README.md").read_text(encoding="utf-8").split("---\n")
    meta, card = yaml.safe_load(front), set_cards()["digits-dm-1"]
    assert meta == {
        "license": "cc-by-4.0",
        "pretty_name": "digits-dm-1",
        "task_categories": ["image-classification"],
        "tags": ["dataset-distillation", "distillkit"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "*/*.png"}]}],
    }
    assert text.startswith("# digits-dm-1\n\nPictures have 8 bits; ")
    for name in card:
        assert text.count(f"\n- {name}: ") == 1, name
    assert f"\n- licence: {card['licence']}\n" in text
    assert f"\n- images: {load_set('digits-dm-1')}\n" in text
    assert f'\n- accuracy: {{"hard": {card["accuracy"]["hard"]}' in text


def test_set_without_a_card_has_no_known_license(tmp_path: Path) -> None:
    load_set("digits-dm-1").replace(info={"method": "mine"}).save(tmp_path / "own.safetensors")
    publish(str(tmp_path / "own.safetensors"), tmp_path / "own")
    text = (tmp_path / "own" / "README.md").read_text(encoding="utf-8")
    assert '\nlicense: "unknown"\n' in text
    assert "\n- method: mine\n" in text


def test_datasets_reads_pictures_and_labels(published: Path, tmp_path: Path) -> None:
    rows = datasets.load_dataset(str(published), split="train", cache_dir=str(tmp_path))
    small = load_set("digits-dm-1")
    assert rows.features["label"].names == list(small.class_names)
    assert rows["label"] == small.labels.tolist()
    assert rows[0]["image"].size == (16, 16)


def test_hub_path_downloads_one_file(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(*args: Any, **options: Any) -> str:
        asked.append((args, options))
        return str(published / "set.safetensors")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    expected = load_set("digits-dm-1")
    require_same_set(load_set("hf://us/digits"), expected)
    require_same_set(load_set("hf://us/digits@v1"), expected)
    for revision, (args, options) in zip((None, "v1"), asked, strict=True):
        assert args == ("us/digits", "set.safetensors")
        assert options == {"repo_type": "dataset", "revision": revision}


@pytest.mark.parametrize("error", [OSError("none there"), ValueError("none there")])
def test_missing_set_of_the_hub_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    refused(lambda: load_set("hf://us/x"), FileNotFoundError, "'hf://us/x' must be hf://owner/name .*: none there")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(lambda: load_set("hf://us/x"), ImportError, r"hf://us/x needs huggingface_hub: pip .*kit\[data\]'")


@pytest.mark.parametrize("more", [[], ["digits-dm-1"], ["digits-dm-1", "--out", "a.npz"]])
def test_card_needs_a_folder(more: list[str]) -> None:
    found = CliRunner().invoke(main, ["sets", *more, "--card"])
    assert found.exit_code == 2
    assert "--card needs --out FOLDER" in found.output
