from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distillkit import Normalization
from distillkit.data import DATASETS, load, open_dataset
from distillkit.data.readers._medmnist import CLASSES
from tests.pictures import bytes_of
from tests.refused import refused
from tests.stored import require_same

# Channels, number of classes, and number of pictures for training, validation and test, after the table of Yang et al.,
# "MedMNIST v2", Scientific Data 2023.
TABLE = {
    "pathmnist": (3, 9, 89_996, 10_004, 7_180),
    "chestmnist": (1, 14, 78_468, 11_219, 22_433),
    "dermamnist": (3, 7, 7_007, 1_003, 2_005),
    "octmnist": (1, 4, 97_477, 10_832, 1_000),
    "pneumoniamnist": (1, 2, 4_708, 524, 624),
    "retinamnist": (3, 5, 1_080, 120, 400),
    "breastmnist": (1, 2, 546, 78, 156),
    "bloodmnist": (3, 8, 11_959, 1_712, 3_421),
    "tissuemnist": (1, 8, 165_466, 23_640, 47_280),
    "organamnist": (1, 11, 34_561, 6_491, 17_778),
    "organcmnist": (1, 11, 12_975, 2_392, 8_216),
    "organsmnist": (1, 11, 13_932, 2_452, 8_827),
}
COUNTS = {"train": 6, "val": 3, "test": 4}


def write(root: Path, name: str, side: int = 28, without: str = "", **other: Any) -> dict[str, NDArray[Any]]:
    """Write a file in the released layout: uint8 [N, side, side(, 3)], labels uint8 [N, 1] or [N, 14] (chestmnist)."""
    channels, classes, *_ = TABLE[name]
    arrays: dict[str, NDArray[Any]] = {}
    for seed, (part, n) in enumerate(COUNTS.items()):
        rng = np.random.default_rng(seed)
        shape = (n, side, side, 3) if channels == 3 else (n, side, side)
        arrays[f"{part}_images"] = rng.integers(0, 256, shape, np.uint8)
        labels = rng.integers(0, 2, (n, 14)) if name == "chestmnist" else np.arange(n)[:, None] % classes
        arrays[f"{part}_labels"] = labels.astype(np.uint8)
    arrays = {key: value for key, value in {**arrays, **other}.items() if key != without}
    np.savez(root / f"{name}{'' if side == 28 else f'_{side}'}.npz", **arrays)
    return arrays


@pytest.mark.parametrize("name", TABLE)
def test_a_set_gives_its_pixels_labels_and_classes(name: str, tmp_path: Path) -> None:
    arrays = write(tmp_path, name)
    split = load(name, root=tmp_path)
    channels, classes, *counts = TABLE[name]
    assert split.validation is not None
    for part, data in (("train", split.train), ("val", split.validation), ("test", split.test)):
        pixels = bytes_of(data.pixels())
        assert np.array_equal(pixels.reshape(arrays[f"{part}_images"].shape), arrays[f"{part}_images"])
        assert np.array_equal(data.labels.numpy().reshape(COUNTS[part], -1), arrays[f"{part}_labels"])
        assert (data.shape, data.num_classes, data.classes_given) == ((channels, 28, 28), classes, True)
        assert data.info["dataset"] == name
    assert DATASETS[name].shape == split.train.shape
    assert DATASETS[name].counts == (counts[0], counts[2], counts[1])
    assert split.train.labels.ndim == (2 if name == "chestmnist" else 1)
    assert split.classes == CLASSES[name]
    assert name != "pathmnist" or split.classes[8] == "colorectal adenocarcinoma epithelium"


@pytest.mark.parametrize("download", [False, True])
def test_a_missing_file_is_named_with_its_source(download: bool, tmp_path: Path) -> None:
    write(tmp_path, "pathmnist")
    words = r"pathmnist_224 is not in .*: missing pathmnist_224\.npz\. Get it from https://zenodo\.org/records/10519652"
    refused(lambda: load("pathmnist_224", root=tmp_path, download=download), FileNotFoundError, words)


def test_invalid_contents_are_named(tmp_path: Path) -> None:
    for missing, words in (("test_labels", "lacks test_labels"), ("val_images", "lacks val_images and val_labels")):
        write(tmp_path, "bloodmnist", side=64, without=missing)
        refused(lambda: load("bloodmnist_64", root=tmp_path), ValueError, rf"bloodmnist_64\.npz {words}")
    write(tmp_path, "bloodmnist", test_labels=np.full((4, 1), 8, np.uint8))
    refused(lambda: load("bloodmnist", root=tmp_path), ValueError, "labels must be below num_classes=8, got 8")


@pytest.mark.parametrize("name", ["pathmnist32", "organmnist3d", "mnist64", "pathmnist640"])
def test_names_outside_the_2d_sets_are_refused(name: str, tmp_path: Path) -> None:
    refused(lambda: load(name, root=tmp_path), ValueError, "name must be one of digits, .*pathmnist")


@pytest.mark.parametrize("name", ["pathmnist", "chestmnist"])
def test_a_stored_set_equals_the_loaded_one(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, side=64)
    half = Normalization([0.5], [0.5])
    opened = open_dataset(f"{name}_64", root=tmp_path, normalization=half, cache=tmp_path / "cache")
    require_same(opened, load(f"{name}_64", root=tmp_path, normalization=half))
