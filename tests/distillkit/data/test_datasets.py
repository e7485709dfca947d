from __future__ import annotations

import bz2
import hashlib
import pickle
import re
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor
from torch.nn import functional as F

from distillkit import LabeledImages, Normalization
from distillkit.data import DATASETS, NAMES, Split, load
from distillkit.rng import derive
from tests.refused import refused

PUBLISHED = ("mnist", "fashionmnist", "usps", "svhn", "cifar10", "cifar100")
COUNTS = {"train": 10, "test": 4}


def raw(name: str, part: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Random uint8 images [N, C, H, W] and labels of one part of a miniature dataset."""
    rng = derive(0, name, part)
    count = COUNTS[part] if count is None else count
    images = torch.randint(0, 256, (count, *DATASETS[name].shape), generator=rng, dtype=torch.uint8)
    return images, torch.arange(count) % 10


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def write_idx(root: Path, name: str) -> None:
    folder = root / {"mnist": "MNIST", "fashionmnist": "FashionMNIST"}[name] / "raw"
    folder.mkdir(parents=True)
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = raw(name, part)
        header = struct.pack(">IIII", 0x803, len(images), 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
        header = struct.pack(">II", 0x801, len(labels))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.byte().numpy().tobytes())


def write_usps(folder: Path, part: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for image, label in zip(*raw("usps", part)):
        # The loader rounds down, so aim at the middle of each grey level.
        values = ((image.double().flatten() + 0.5) / 255 * 2 - 1).tolist()
        lines.append(f"{label + 1} " + " ".join(f"{i + 1}:{value:.6f}" for i, value in enumerate(values)))
    name = {"train": "usps.bz2", "test": "usps.t.bz2"}[part]
    (folder / name).write_bytes(bz2.compress("\n".join(lines).encode()))


def write_svhn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat

    folder = root / "SVHN"
    folder.mkdir(parents=True)
    checked = {}
    for part in ("train", "test"):
        images, labels = raw("svhn", part)
        file = folder / f"{part}_32x32.mat"
        savemat(file, {"X": images.permute(2, 3, 1, 0).numpy(), "y": np.where(labels == 0, 10, labels)[:, None]})
        checked[part] = ["", file.name, md5(file)]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", checked)


def write_cifar(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickled batches; torchvision's list of checksums is replaced by that of our files."""
    cls = getattr(torchvision.datasets, name.upper())
    folder = root / cls.base_folder
    folder.mkdir(parents=True)
    key = "labels" if name == "cifar10" else "fine_labels"
    for part in ("train", "test"):
        entries = getattr(cls, f"{part}_list")
        batches = zip(*(t.chunk(len(entries)) for t in raw(name, part)))
        checked = []
        for (file, _), (images, labels) in zip(entries, batches):
            batch = {"data": images.flatten(1).numpy(), key: labels.tolist()}
            (folder / file).write_bytes(pickle.dumps(batch))
            checked.append([file, md5(folder / file)])
        monkeypatch.setattr(cls, f"{part}_list", checked)
    names = [f"class {k}" for k in range(100 if name == "cifar100" else 10)]
    file = folder / cls.meta["filename"]
    file.write_bytes(pickle.dumps({cls.meta["key"]: names}))
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": md5(file)})


def write(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("mnist", "fashionmnist"):
        write_idx(root, name)
    elif name == "usps":
        for part in ("train", "test"):
            write_usps(root / "USPS", part)
    elif name == "svhn":
        write_svhn(root, monkeypatch)
    else:
        write_cifar(root, name, monkeypatch)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_layout_and_an_npz_give_pixels_labels_and_statistics(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "both", name, monkeypatch)
    theirs = load(name, root=tmp_path / "both")
    (tmp_path / "both" / f"{name}.npz").write_text("another program's", encoding="utf-8")
    stored = {}
    for part in ("train", "test"):
        images, labels = raw(name, part)
        stored |= {f"{part}_images": images.permute(0, 2, 3, 1).numpy(), f"{part}_labels": labels.numpy()}
    np.savez(tmp_path / f"{name}.npz", **stored)
    ours = load(name, root=tmp_path)
    normalization = DATASETS[name].normalization
    assert normalization is not None
    for split in (theirs, load(name, root=tmp_path / "both"), ours):
        for part, data in zip(("train", "test"), split, strict=True):
            images, labels = raw(name, part)
            assert data.images.dtype == torch.float32
            assert data.normalization == normalization
            assert torch.equal(data.labels, labels)
            assert torch.equal((data.pixels() * 255).round().byte(), images)
            assert torch.equal(data.images, normalization.encode(images.float() / 255))
            assert data.info == {"dataset": name, "split": part}
        assert split.validation is None
        assert split.train.num_classes == len(split.classes)
    assert theirs.train.num_classes == (100 if name == "cifar100" else 10)
    assert ours.classes == theirs.classes or name == "cifar100"
    assert name != "fashionmnist" or theirs.classes == tuple(torchvision.datasets.FashionMNIST.classes)
    assert name != "cifar100" or theirs.classes == tuple(f"class {k}" for k in range(100))
    if len(normalization.mean) == 3:
        assert load(name, root=tmp_path, channels=1).train.normalization != normalization


def test_digits_are_the_same_real_images_in_every_call(global_rng_untouched: None) -> None:
    from sklearn.datasets import load_digits

    split = load("digits")
    train, test = split
    assert isinstance(split, Split)
    assert (len(train), len(test), train.shape) == (1438, 359, (1, 8, 8))
    assert torch.equal(load("digits", download=True).test.images, test.images)  # there is nothing to download
    both = LabeledImages.concatenate([train, test])
    bunch = load_digits()
    everything = {(image.tobytes(), int(k)) for image, k in zip(bunch.images.astype(np.float32), bunch.target)}
    found = {((x * 16).round().numpy().tobytes(), int(k)) for x, k in zip(both.pixels()[:, 0], both.labels)}
    assert found == everything
    assert ((test.counts() / both.counts() - 0.2).abs() < 0.003).all()
    measured = Normalization.of(train.pixels())
    assert train.mean == test.mean == pytest.approx(measured.mean, abs=5e-5)
    assert train.std == test.std == pytest.approx(measured.std, abs=5e-5)
    assert load("digits", channels=3).test.normalization == DATASETS["digits"].normalization


def test_colour_is_resized_and_turned_grey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, "cifar10", monkeypatch)
    red, green, blue = (raw("cifar10", "train")[0].float() / 255).unbind(1)
    luma = (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]
    for size in ((7, 50), (40, 9), (20, 32), (32, 32)):
        expected = F.interpolate(luma, size, mode="bilinear", antialias=True)
        measured = Normalization.of(expected)
        split = load("cifar10", root=tmp_path, size=size, channels=1)
        torch.testing.assert_close(split.train.pixels(), expected, atol=1e-5, rtol=0)
        for data in split:
            assert (*data.mean, *data.std) == pytest.approx((*measured.mean, *measured.std), abs=1e-5)


def test_the_root_comes_from_the_argument_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "there", "mnist")
    monkeypatch.setenv("DISTILLKIT_DATA", str(tmp_path / "there"))
    assert len(load("mnist").train) == 10
    refused(lambda: load("mnist", root=tmp_path), FileNotFoundError, "MNIST/raw/train-images")
    monkeypatch.setenv("DISTILLKIT_DATA", "")
    refused(lambda: load("MNIST"), ValueError, r"root must name the folder of mnist; .*DISTILLKIT_DATA")
    monkeypatch.delenv("DISTILLKIT_DATA")
    refused(lambda: load("mnist"), ValueError, "root must name the folder")


@pytest.mark.parametrize("name", PUBLISHED)
def test_missing_files_are_named_with_the_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, name, monkeypatch)
    files = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    files[0].unlink()
    words = (
        f"{name} is not complete in {tmp_path}: missing {files[0].relative_to(tmp_path)}. Get it with\n    python -c "
    )
    words += f"\"from distillkit.data import load; load('{name}', root='{tmp_path}', download=True)\"\n"
    words += f"or give the root of your copy, with these files or a {name}.npz (see load_npz), with root= or "
    refused(lambda: load(name, root=tmp_path), FileNotFoundError, re.escape(words))
    refused(lambda: load(name, root=tmp_path / "none"), FileNotFoundError, f"missing {DATASETS[name].files}, ")


def test_damaged_files_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mnist", "usps", "cifar10"):
        write(tmp_path, name, monkeypatch)
    (tmp_path / "USPS" / "usps.bz2").write_bytes(b"nothing")
    words = r"usps in .* cannot be read \(USPS/usps.bz2, USPS/usps.t.bz2\): .+; delete the files"
    refused(lambda: load("usps", root=tmp_path), ValueError, words)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"")
    refused(lambda: load("mnist", root=tmp_path), ValueError, r"mnist in .* cannot be read")
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes() + b"x")
    for download in (False, True):
        call = partial(load, "cifar10", root=tmp_path, download=download)
        refused(call, ValueError, r"cifar10 in .* cannot be read .*corrupted")


def test_missing_files_are_downloaded_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def fetch(url: str, root: str, filename: str, md5: str) -> None:
        fetched.append(filename)
        write_usps(Path(root), "test" if ".t." in filename else "train")

    monkeypatch.setattr("torchvision.datasets.usps.download_url", fetch)
    with pytest.raises(FileNotFoundError):
        load("usps", root=tmp_path)
    assert fetched == []
    assert len(load("usps", root=tmp_path, download=True).train) == 10
    assert len(load("usps", root=tmp_path, download=True).train) == 10
    assert fetched == ["usps.bz2", "usps.t.bz2"]

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("torchvision.datasets.usps.download_url", fail)
    refused(lambda: load("usps", root=tmp_path / "new", download=True), ConnectionError, "no network")


PAGE = (Path(__file__).parents[3] / "docs/components/data.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`").replace("-", ""): cells[1:]
    for line in PAGE.split("## `load`")[1].split("\n## ")[0].splitlines()
    if line.startswith("| `") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_page_equal_the_table(name: str) -> None:
    dataset, (counts, shape, files, mean, std) = DATASETS[name], ROWS[name]
    words = counts.replace(",", "").replace("/", " ").replace(";", " ").split()
    numbers = [int(word) for word in words if word.isdigit()]
    assert tuple(numbers) == dataset.counts
    assert shape == "x".join(map(str, dataset.shape))
    assert dataset.files.split("/")[0].lower() in files.lower()
    published = dataset.normalization
    for text, values in ((mean, published and published.mean), (std, published and published.std)):
        assert text == (" ".join(f"{v:.4f}"[1:] for v in values) if values else "measured")


def test_every_dataset_has_classes_or_names_them_in_its_files() -> None:
    assert len(ROWS) == 13
    assert all(len(set(row.classes)) == len(row.classes) for row in DATASETS.values())
    assert all(row.files for name, row in DATASETS.items() if name not in ("digits", "synthdigitslike"))
    assert set(NAMES) == set(DATASETS)
    assert {name: (row.shape, row.counts, row.options[:1]) for name, row in DATASETS.items() if row.folder} == {
        "tinyimagenet": ((3, 64, 64), (100_000, 10_000), ("progress",)),
        "cifar10c": ((3, 32, 32), (152_000, 38_000), ("corruptions",)),  # a fifth of 19 times 10,000 for the test
        "femnist": ((1, 28, 28), (), ()),
        "celeba": ((3, 84, 84), (162_770, 19_962, 19_867), ("attributes",)),
        "leaf-celeba": ((3, 84, 84), (), ("images",)),
        "flair": ((3, 256, 256), (345_879, 43_960, 39_239), ("labels",)),
    }
