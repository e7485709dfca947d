from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from distillkit import Normalization
from distillkit.data import load, load_cifar10c, partition
from distillkit.data.readers.cifar10c import CORRUPTIONS, split_cifar10c
from tests.pictures import bytes_of
from tests.refused import refused

EACH = 20


def pictures(name: str) -> NDArray[Any]:
    return np.random.default_rng(sum(map(ord, name))).integers(0, 256, (5 * EACH, 32, 32, 3), np.uint8)


def write(folder: Path, *names: str) -> Path:
    """Write the released layout: a block of pictures for each severity, and repeated labels."""
    for name in names:
        np.save(folder / f"{name}.npy", pictures(name))
    np.save(folder / "labels.npy", np.tile(np.arange(EACH)[::-1] % 10, 5).astype(np.uint8))
    return folder


def test_the_release_has_nineteen_corruptions() -> None:
    assert len(set(CORRUPTIONS)) == len(CORRUPTIONS) == 19
    assert CORRUPTIONS[12] == "elastic_transform"  # called so by the release's script, "Elastic" in its tables
    assert CORRUPTIONS[15:] == ("speckle_noise", "gaussian_blur", "spatter", "saturate")


def test_a_domain_is_a_corruption_at_a_severity(tmp_path: Path, global_rng_untouched: None) -> None:
    write(tmp_path, "fog", "snow")
    data = load_cifar10c(tmp_path, corruptions=("snow", "fog"), severities=(5, 1, 3))
    assert data.info == {"dataset": "cifar10c", "domains": [f"{name}-{k}" for name in ("snow", "fog") for k in "513"]}
    assert (data.shape, data.class_names[:2], data.classes_given) == ((3, 32, 32), ("airplane", "automobile"), True)
    stored = {"snow": pictures("snow"), "fog": pictures("fog")}
    for number, domain in enumerate(data.info["domains"]):
        name, severity = domain.split("-")
        mine = data[data.columns["domain"] == number]
        block = stored[name][(int(severity) - 1) * EACH : int(severity) * EACH]
        assert np.array_equal(bytes_of(mine.pixels()), block)
        assert mine.labels.tolist() == [k % 10 for k in reversed(range(EACH))]
        assert mine.columns["picture"].tolist() == list(range(EACH))
    assert [len(part) for part in partition.by_domain(data.columns["domain"], 12)] == [EACH // 2] * 12


def test_default_normalization_is_that_of_cifar10(tmp_path: Path) -> None:
    write(tmp_path, "fog", "snow")
    published = load_cifar10c(tmp_path, corruptions=["fog"]).normalization
    assert load_cifar10c(tmp_path, corruptions=["fog"], channels=3).normalization == published
    assert published == Normalization([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
    half = Normalization([0.5], [0.5])
    given = load_cifar10c(tmp_path, corruptions=["fog"], normalization=half)
    assert given.normalization == half
    torch.testing.assert_close(given.images.amin(), torch.tensor(-1.0))
    grey = load_cifar10c(tmp_path, corruptions=["fog", "snow"], channels=1, size=(16, 8))
    assert (grey.shape, grey.normalization.measured) == ((1, 16, 8), True)
    measured = Normalization.of(grey.pixels())
    assert (*grey.mean, *grey.std) == pytest.approx((*measured.mean, *measured.std), abs=1e-7)


def test_only_requested_files_are_required(tmp_path: Path) -> None:
    write(tmp_path, "fog")
    (tmp_path / "snow.npy").write_bytes(b"damaged")
    assert len(load_cifar10c(tmp_path, corruptions=["fog"])) == EACH
    (tmp_path / "labels.npy").unlink()
    words = r"lacks frost\.npy, labels\.npy; get CIFAR-10-C from https://zenodo\.org/records/2535967"
    refused(lambda: load_cifar10c(tmp_path, corruptions=["fog", "frost"]), FileNotFoundError, words)
    refused(lambda: load_cifar10c(tmp_path / "no"), FileNotFoundError, "lacks gaussian_noise.npy, .*, labels.npy; get")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"corruptions": ["rain"]}, ValueError, "corruptions must be"),
        ({"corruptions": []}, ValueError, "corruptions must be distinct, at least one"),
        ({"corruptions": ["fog", "fog"]}, ValueError, "corruptions must be distinct"),
        ({"corruptions": "fog"}, TypeError, "corruptions must be"),
        ({"corruptions": ["fog"], "severities": [0]}, ValueError, "severities must be"),
        ({"corruptions": ["fog"], "severities": [6]}, ValueError, "severities must be"),
        ({"corruptions": ["fog"], "severities": [1, 1]}, ValueError, r"severities must be distinct, .* got \[1, 1\]"),
        ({"corruptions": ["fog"], "severities": 5}, TypeError, "severities must be"),
        ({"corruptions": ["fog"], "pictures": 0}, ValueError, "pictures must be at least 1"),
        ({"corruptions": ["fog"], "pictures": 21}, ValueError, "pictures must be at most 20"),
    ],
)
def test_invalid_options_are_refused(options: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    refused(lambda: split_cifar10c(write(tmp_path, "fog"), **options), error, words)


@pytest.mark.parametrize(
    ("file", "array", "words"),
    [
        ("fog", pictures("fog")[:-1], r"fog\.npy must hold uint8 pictures \[100, H, W, 3\].*got uint8 \[99, "),
        ("fog", pictures("fog")[..., 0], r"fog\.npy must hold uint8 pictures .*got uint8 \[100, 32, 32\]"),
        ("fog", pictures("fog")[..., [0, 1, 2, 0]], r"fog\.npy must hold .*got uint8 \[100, 32, 32, 4\]"),
        ("fog", pictures("fog") / 255, r"fog\.npy must hold uint8 pictures .*got float64"),
        ("fog", np.array([None, {}], dtype=object), r"fog\.npy is damaged or not a \.npy of plain numbers"),
        ("labels", np.zeros(99, np.uint8), r"labels\.npy must hold uint8 labels .*got uint8 \[99\]"),
        ("labels", np.zeros(100, np.int8), r"labels\.npy must hold uint8 labels .*got int8 \[100\]"),
        ("labels", np.zeros(0, np.uint8), r"labels\.npy must hold uint8 labels .*got uint8 \[0\]"),
        ("labels", (np.arange(100) // 80).astype(np.uint8), "labels .*, the same for each of 5 severities"),
        ("labels", np.full(100, 10, np.uint8), "labels must be below num_classes=10"),
    ],
)
def test_files_of_another_layout_are_refused(file: str, array: NDArray[Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, "fog")
    np.save(tmp_path / f"{file}.npy", array)
    refused(lambda: load_cifar10c(tmp_path, corruptions=["fog"]), ValueError, words)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    whole = (write(tmp_path, "fog") / "fog.npy").read_bytes()
    for damaged in (b"", b"hello", whole[:-1], whole[:50]):
        (tmp_path / "fog.npy").write_bytes(damaged)
        refused(lambda: load_cifar10c(tmp_path, corruptions=["fog"]), ValueError, r"fog\.npy is damaged")


def test_domains_share_no_picture_between_train_and_test(tmp_path: Path, global_rng_untouched: None) -> None:
    (folder := tmp_path / "CIFAR-10-C").mkdir()
    write(folder, "fog", "snow")
    split = load("cifar10c", root=tmp_path, corruptions=("snow", "fog"), test_fraction=0.5, hold_out="random")
    assert split.domains == ("snow-5", "fog-5")
    assert split.classes[:2] == ("airplane", "automobile")
    trained, tested = (set(data.columns["picture"].tolist()) for data in split)
    assert (trained & tested, trained | tested) == (set(), set(range(EACH)))
    for data in split:
        assert data.columns["domain"].bincount().tolist() == [EACH // 2] * 2
        assert data.counts().tolist() == [2] * 10  # 20 pictures of 10 classes, halved, in two corruptions
    assert split.test.info["apart"] == "picture"
    whole = split_cifar10c(folder, corruptions=["fog"], pictures=EACH, hold_out="content")
    assert (sum(map(len, whole)), whole.train.info["hold_out"]) == (EACH, "content")
    few = split_cifar10c(folder, corruptions=["fog", "snow"], pictures=15, test_fraction=0.5)
    kept = torch.cat([torch.stack([data.columns["domain"], data.columns["picture"]], 1) for data in few])
    assert sorted(kept.tolist()) == [[domain, picture] for domain in range(2) for picture in range(15)]
