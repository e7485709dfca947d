from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distillkit import Normalization
from distillkit.data import clients, load_client_arrays, partition
from tests.refused import refused

COUNTS = {"train": (4, 2, 6), "test": (1, 2, 1)}


def stored(part: str, client: int, side: int = 6) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng([client, len(part)])
    n = COUNTS[part][client]
    return rng.integers(0, 256, (n, side, side, 3), np.uint8), rng.integers(0, 5, n)


def write(folder: Path) -> Path:
    for part, counts in COUNTS.items():
        (folder / part).mkdir(parents=True)
        for client in range(len(counts)):
            for kind, array in zip(("images", "labels"), stored(part, client)):
                np.save(folder / part / f"client{client}_{kind}.npy", array)
    return folder


def test_clients_have_the_images_of_their_files(tmp_path: Path, global_rng_untouched: None) -> None:
    split = load_client_arrays(write(tmp_path / "preprocessed"), classes=tuple("abcde"))
    assert split.users == ("client0", "client1", "client2")
    for part, data in (("train", split.train), ("test", split.test)):
        assert data.info == {"dataset": "preprocessed", "split": part}
        mine = clients(data, partition.by_domain(data.columns["user"]))
        for number, own in enumerate(mine):
            images, labels = stored(part, number)
            assert np.array_equal((own.pixels() * 255).round().byte().permute(0, 2, 3, 1).numpy(), images)
            assert own.labels.tolist() == labels.tolist()
    assert split.train.mean == pytest.approx(Normalization.of(split.train.pixels()).mean, abs=1e-6)
    assert split.train.classes_given


def test_size_and_derived_classes(tmp_path: Path) -> None:
    half = Normalization([0.5], [0.5])
    write(tmp_path / "a")
    for kind, array in zip(("images", "labels"), stored("train", 1, side=9)):
        np.save(tmp_path / "a" / "train" / f"client1_{kind}.npy", array)
    with pytest.raises(ValueError, match=r"client0's pictures are \[6, 6, 3\], client1's \[9, 9, 3\]; give size="):
        load_client_arrays(tmp_path / "a")
    split = load_client_arrays(tmp_path / "a", size=4, channels=1, normalization=half)
    assert split.train.shape == (1, 4, 4)
    assert split.train.normalization == half
    assert not split.train.classes_given


def test_a_client_may_have_no_test_images(tmp_path: Path) -> None:
    write(tmp_path / "a")
    np.save(tmp_path / "a" / "test" / "client1_images.npy", np.zeros((0, 6, 6, 3), np.uint8))
    np.save(tmp_path / "a" / "test" / "client1_labels.npy", np.zeros(0, np.int64))
    assert load_client_arrays(tmp_path / "a", size=4).test.columns["user"].tolist() == [0, 2]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lacks train/client0_images\.npy, train/client0_labels\.npy, test/"):
        load_client_arrays(tmp_path)
    write(tmp_path / "a")
    (tmp_path / "a" / "train" / "client1_images.npy").unlink()
    (tmp_path / "a" / "test" / "client2_labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks train/client1_images\.npy, test/client2_labels\.npy; expected"):
        load_client_arrays(tmp_path / "a")


@pytest.mark.parametrize(
    ("kind", "array", "words"),
    [
        ("images", np.zeros((2, 3, 6, 6), np.uint8), r"client1_images\.npy must hold uint8 pictures .* \[2, 3, 6, 6\]"),
        ("images", np.zeros((2, 6, 6, 3)), r"client1_images\.npy must hold uint8 .* got float64"),
        ("images", np.array([None, {}], dtype=object), r"client1_images\.npy is damaged or not a \.npy of plain"),
        ("labels", np.zeros(3, np.int64), r"client1_labels\.npy must hold 2 integers.*got int64 \[3\]"),
        ("labels", np.zeros(2), r"client1_labels\.npy must hold 2 integers.*got float64"),
        ("labels", np.array([0, -1]), "labels must be at least 0"),
        ("labels", np.array([0, 5]), "labels must be below num_classes=5"),
    ],
)
def test_files_of_another_layout_are_refused_by_name(
    kind: str, array: np.ndarray[Any, Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "a")
    np.save(tmp_path / "a" / "train" / f"client1_{kind}.npy", array)
    refused(lambda: load_client_arrays(tmp_path / "a", classes=tuple("abcde")), ValueError, words)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "a") / "test" / "client0_images.npy"
    file.write_bytes(file.read_bytes()[:-1])
    refused(lambda: load_client_arrays(tmp_path / "a"), ValueError, r"test/client0_images\.npy is damaged")
