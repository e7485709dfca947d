from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from distillkit import Normalization
from distillkit.data import load
from tests.pictures import bytes_of, save
from tests.refused import refused

HALF = Normalization([0.5], [0.5])
mnistm, synth = partial(load, "mnistm"), partial(load, "synthdigits")
LABELS = {"train": [3, 0, 9, 1], "test": [7, 2]}


def stored(part: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(part)).integers(0, 256, (len(LABELS[part]), 32, 32, 3), np.uint8)


def released(folder: Path) -> None:
    """Write the content of Ganin's `mnist_m.tar.gz`."""
    for part, labels in LABELS.items():
        names = [f"{i:08d}.png" for i in reversed(range(len(labels)))]
        for name, picture in zip(names, stored(part)):
            save(folder / f"mnist_m_{part}" / name, picture)
        lines = "".join(f"{name} {label}\n" for name, label in zip(names, labels))
        (folder / f"mnist_m_{part}_labels.txt").write_text(lines + "\n", encoding="utf-8")


def ported(folder: Path, channels_first: bool = False) -> None:
    folder.mkdir(parents=True)
    for part, labels in LABELS.items():
        images = torch.from_numpy(stored(part))
        images = images.permute(0, 3, 1, 2) if channels_first else images
        torch.save((images, torch.tensor(labels)[:, None]), folder / f"mnist_m_{part}.pt")


def packed(folder: Path) -> None:
    folder.mkdir(parents=True)
    arrays = {f"{part}_images": stored(part) for part in LABELS} | {f"{part}_labels": LABELS[part] for part in LABELS}
    np.savez(folder / "mnist_m.npz", **{name: np.asarray(array) for name, array in arrays.items()})


@pytest.mark.parametrize(
    ("write", "place"),
    [
        (released, "mnist_m"),
        (released, "MNIST-M"),
        (ported, "MNISTM/processed"),
        (lambda folder: ported(folder, channels_first=True), "MNIST-M"),
        (packed, "MNIST-M"),
    ],
)
def test_mnistm_in_its_three_layouts(write: Any, place: str, tmp_path: Path, global_rng_untouched: None) -> None:
    write(tmp_path / place)
    for name in ("mnistm", "MNIST-M"):
        split = load(name, root=tmp_path, normalization=HALF)
        for part, data in zip(("train", "test"), split, strict=True):
            assert np.array_equal(bytes_of(data.pixels()), stored(part))
            assert data.labels.tolist() == LABELS[part]
            assert data.info == {"dataset": "mnistm", "split": part}
            assert (data.num_classes, data.classes_given) == (10, True)
    assert split.classes == tuple("0123456789")
    small = mnistm(root=tmp_path, size=8, channels=1).train
    assert small.shape == (1, 8, 8)
    assert small.mean == pytest.approx(Normalization.of(small.pixels()).mean, abs=1e-6)


def test_missing_mnistm_files_are_named(tmp_path: Path) -> None:
    refused(lambda: mnistm(root=tmp_path), FileNotFoundError, "missing MNIST-M/mnist_m_train_labels.txt .* mnistm-like")
    released(tmp_path / "a" / "mnist_m")
    (tmp_path / "a" / "mnist_m" / "mnist_m_test" / "00000001.png").unlink()
    refused(lambda: mnistm(root=tmp_path / "a"), FileNotFoundError, "mnist_m_test lacks 1 .*, such as 00000001.png;")
    (tmp_path / "a" / "mnist_m" / "mnist_m_test_labels.txt").unlink()
    refused(lambda: mnistm(root=tmp_path / "a"), FileNotFoundError, r"missing mnist_m_test_labels\.txt")
    ported(tmp_path / "b" / "MNISTM")
    (tmp_path / "b" / "MNISTM" / "mnist_m_test.pt").unlink()
    refused(lambda: mnistm(root=tmp_path / "b"), FileNotFoundError, r"in .*/b/MNISTM: missing mnist_m_test\.pt")


@pytest.mark.parametrize("text", ["0.png 1 1", "0.png 10", "0.png", "0.png three", ""])
def test_label_files_of_another_layout_are_refused(text: str, tmp_path: Path) -> None:
    released(tmp_path / "mnist_m")
    (tmp_path / "mnist_m" / "mnist_m_train_labels.txt").write_text(f"{text}\nx\n" * bool(text), encoding="utf-8")
    words = f"must hold lines of a picture's name and a digit, got '{text}'$" if text else "names no pictures; get it"
    refused(lambda: mnistm(root=tmp_path), ValueError, rf"mnist_m_train_labels\.txt {words}")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ((Evil(), Evil()), "damaged or no pair of tensors"),
        (torch.zeros(3), "damaged or no pair of tensors"),
        ((torch.zeros(2, 32, 32, 3), torch.zeros(2)), "must hold images uint8"),
        ((torch.zeros(2, 32, 32, 3).byte(), torch.zeros(3)), "must hold images uint8 .* and 3 labels"),
        ((torch.zeros(2, 32, 32, 3).byte(), torch.zeros(1)), "must hold images uint8 .* and 1 labels"),
        ((torch.zeros(0, 32, 32, 3).byte(), torch.zeros(0)), "must hold colour .* digits 0..9, at least one"),
        ((torch.zeros(2, 32, 32, 1).byte(), torch.zeros(2)), "must hold colour pictures of the digits"),
        ((torch.zeros(2, 32, 32, 3).byte(), torch.tensor([0, -1])), "must hold colour pictures of the digits 0..9"),
        ((torch.zeros(2, 32, 32, 3).byte(), torch.tensor([0, 10])), "must hold colour pictures of the digits 0..9"),
    ],
)
def test_a_pt_file_constructs_only_tensors(held: Any, words: str, tmp_path: Path, capsys: Any) -> None:
    ported(tmp_path / "MNIST-M")
    torch.save(held, tmp_path / "MNIST-M" / "mnist_m_train.pt")
    refused(lambda: mnistm(root=tmp_path), ValueError, rf"mnist_m_train\.pt .*{words}")
    assert "executed" not in capsys.readouterr().out


def matlab(folder: Path, zero: int = 0, **change: Any) -> None:
    """Write files in SVHN's layout: pictures along the last axis, labels in a column."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, labels in LABELS.items():
        y = np.array([label or zero for label in labels], np.uint8)[:, None]
        held = {"X": stored(part).transpose(1, 2, 3, 0), "y": y, **change}
        savemat(folder / f"synth_{part}_32x32.mat", held)


@pytest.mark.parametrize("zero", [0, 10])
def test_synthdigits_files(zero: int, tmp_path: Path, global_rng_untouched: None) -> None:
    matlab(tmp_path / "SynthDigits", zero)
    split = load("SynthDigits", root=tmp_path, normalization=HALF)
    for part, data in zip(("train", "test"), split, strict=True):
        assert np.array_equal(bytes_of(data.pixels()), stored(part))
        assert data.labels.tolist() == LABELS[part]
        assert data.info == {"dataset": "synthdigits", "split": part}
    assert synth(root=tmp_path, size=16).train.shape == (3, 16, 16)


def test_missing_or_damaged_synthdigits_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing synth_train_32x32\.mat, synth_test_32x32\.mat.*-like"):
        synth(root=tmp_path)
    matlab(tmp_path / "SynthDigits")
    file = tmp_path / "SynthDigits" / "synth_test_32x32.mat"
    file.write_bytes(file.read_bytes()[:100])
    refused(lambda: synth(root=tmp_path), ValueError, r"synth_test_32x32\.mat is damaged or lacks X or y")
    for change in ({"y": np.zeros((9, 1))}, {"X": np.zeros((32, 32, 3, 4))}, {"X": np.zeros((32, 32, 1, 4), np.uint8)}):
        matlab(tmp_path / "SynthDigits", **change)
        words = r"synth_train_32x32\.mat must hold X, uint8 .*got \w+ \[32, 32, [13], 4\] and"
        refused(lambda: synth(root=tmp_path), ValueError, words)
    matlab(tmp_path / "SynthDigits", y=np.full((4, 1), 11))
    refused(lambda: synth(root=tmp_path), ValueError, r"synth_train_32x32\.mat must hold colour pictures")
