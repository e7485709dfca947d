"""Exported sets come back: an `.npz` to the bit, a folder of PNGs up to rounding, and say what is lost."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Grayscale, ToTensor

from distillkit import LabeledImages, Normalization
from distillkit.normalization import IDENTITY, ZCA
from distillkit.rng import derive

NAMES = st.sampled_from([(), ("ant", "bee", "cat"), ("T-shirt/top", "Coat", 'a,"b"'), ("zoo", "Ape", "ape")])


@st.composite
def sets(draw: st.DrawFn, low: float = -0.5, high: float = 1.5) -> LabeledImages:
    n, c, h, w = (
        draw(st.integers(0, 5)),
        draw(st.sampled_from([1, 3])),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )
    rng = derive(draw(st.integers(0, 10**6)))
    pixels = low + (high - low) * torch.rand(n, c, h, w, generator=rng)
    labels = torch.randint(3, (n,), generator=rng)
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([torch.float16, torch.float32, torch.float64]))
        labels = torch.rand(n, 3, generator=rng, dtype=torch.float64).softmax(1).to(dtype)
    normalization = draw(st.sampled_from([IDENTITY, Normalization([0.4] * c, [0.3] * c)]))
    return LabeledImages(
        normalization.encode(pixels),
        labels,
        num_classes=3,
        normalization=normalization,
        class_names=draw(NAMES),
        info={"method": "by hand", "steps": 3},
    )


def assert_same(a: LabeledImages, b: LabeledImages) -> None:
    assert a.images.shape == b.images.shape
    assert a.labels.dtype == b.labels.dtype
    assert torch.equal(a.labels, b.labels)
    assert (a.num_classes, a.class_names, a.info, a.classes_given) == (
        b.num_classes, b.class_names, b.info, b.classes_given,
    )  # fmt: skip
    assert a.normalization == b.normalization


@settings(max_examples=15)
@given(data=sets())
def test_an_npz_loses_nothing(data: LabeledImages, tmp_path_factory: pytest.TempPathFactory) -> None:
    given_set = data.replace(columns={"client": torch.arange(len(data)), "logits": torch.rand(len(data), 3)})
    path = tmp_path_factory.mktemp("npz") / "set.npz"
    loaded = LabeledImages.load(given_set.export(path))
    assert_same(loaded, given_set)
    assert torch.equal(loaded.images, given_set.images)
    assert all(torch.equal(loaded.columns[name], given_set.columns[name]) for name in given_set.columns)
    assert [p.name for p in path.parent.iterdir()] == ["set.npz"]


@settings(max_examples=15, deadline=None)
@given(data=sets(0.0, 1.0))
def test_a_folder_loses_at_most_half_a_step_and_nothing_the_second_time(
    data: LabeledImages, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("folder")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = LabeledImages.load(data.export(folder / "a"))
        again = LabeledImages.load(loaded.export(folder / "b"))
    assert_same(loaded, data)
    assert torch.allclose(loaded.pixels(), data.pixels(), atol=1 / 510 + 1e-6)
    assert_same(again, data)
    assert torch.equal(again.images, loaded.images)
    for one in (folder / "a").rglob("*.png"):
        assert one.read_bytes() == (folder / "b" / one.relative_to(folder / "a")).read_bytes()
    assert json.loads((folder / "a" / "set.json").read_text(encoding="utf-8"))["largest_error"] <= 1 / 510 + 1e-6


def some(**changes: object) -> LabeledImages:
    pixels = torch.rand(6, 1, 4, 4, generator=derive(0))
    return LabeledImages(pixels, torch.arange(6) % 3, num_classes=3).replace(**changes)


@pytest.mark.parametrize("names", [(), ("ant", "bee", "cat"), ("Coat", "T-shirt/top", "Bag"), ("b", "B", "a")])
def test_image_folder_reads_the_class_order(tmp_path: Path, names: tuple[str, ...]) -> None:
    data = some(class_names=names)
    read = ImageFolder(data.export(tmp_path / "out"), Compose([Grayscale(), ToTensor()]))
    order = [int(Path(path).stem) for path, _ in read.samples]
    assert [label for _, label in read.samples] == data.labels[order].tolist()
    assert torch.allclose(torch.stack([image for image, _ in read]), data.images[order], atol=1 / 500)
    if names == ("ant", "bee", "cat"):
        assert read.classes == list(names)
    else:
        assert len(set(map(str.casefold, read.classes))) == 3


def test_labels_are_in_a_table(tmp_path: Path) -> None:
    rows = torch.tensor([[0.7, 0.2, 0.1]] * 5 + [[0.1, 0.3, 0.6]])
    folder = some(labels=rows, class_names=("ant", "bee", "cat")).export(tmp_path / "out")
    table = list(csv.DictReader((folder / "labels.csv").open(encoding="utf-8")))
    assert table[5]["file"] == "cat/5.png"
    assert (table[5]["label"], table[5]["class"]) == ("2", "cat")
    assert np.float32(table[5]["p2"]) == np.float32(0.6)


def test_an_npz_is_readable_with_numpy_alone(tmp_path: Path) -> None:
    space = Normalization([0.4], [0.3])
    data = some(class_names=("ant", "bee", "cat")).renormalize(space)
    with np.load(data.export(tmp_path / "a.npz"), allow_pickle=False) as file:
        pixels = file["images"] * file["std"][:, None, None] + file["mean"][:, None, None]
        assert np.allclose(pixels, data.pixels(), atol=1e-6)
        assert file["class_names"].tolist() == ["ant", "bee", "cat"]
        assert file["labels"].tolist() == data.labels.tolist()


def test_a_folder_says_what_it_leaves_out(tmp_path: Path) -> None:
    whitened = some(images=some().images.repeat(4, 1, 1, 1), labels=torch.arange(24) % 3)
    whitened = whitened.renormalize(Normalization([0.0], [1.0], ZCA.fit(whitened.images)))
    data = whitened.replace(columns={"client": torch.zeros(24)})
    with pytest.warns(UserWarning, match="PNG pictures leave out the column 'client'; the whitening"):
        loaded = LabeledImages.load(data.export(tmp_path / "a"))
    assert loaded.normalization == IDENTITY
    assert torch.allclose(loaded.images, whitened.pixels(), atol=1 / 500)
    assert LabeledImages.load(data.export(tmp_path / "a.npz")).normalization == data.normalization
    with pytest.warns(UserWarning, match=r"leave out 50\.0% of the pixels, which lie outside \[0, 1\] and are clipped"):
        some(images=torch.tensor([1.3, 0.5]).repeat(6, 8).view(6, 1, 4, 4)).export(tmp_path / "b")
    form = json.loads((tmp_path / "b" / "set.json").read_text(encoding="utf-8"))
    assert form["largest_error"] == pytest.approx(0.3, abs=1e-3)


def test_wrong_targets_are_refused(tmp_path: Path) -> None:
    some().export(tmp_path / "a")
    (tmp_path / "file").write_text("a", encoding="utf-8")
    for taken in ("a", "file"):
        with pytest.raises(FileExistsError, match="is not an empty folder"):
            some().export(tmp_path / taken)
    (tmp_path / "empty").mkdir()
    assert len(LabeledImages.load(some().export(tmp_path / "empty"))) == 6
    with pytest.raises(ValueError, match=r"path must end in \.npz, or be a folder without suffix, got 'a\.png'"):
        some().export(tmp_path / "a.png")
    two = LabeledImages(torch.rand(3, 2, 4, 4), torch.arange(3))
    with pytest.raises(ValueError, match=r"PNG pictures have 1 or 3 channels, got 2; export to an \.npz"):
        two.export(tmp_path / "two")
    assert LabeledImages.load(two.export(tmp_path / "two.npz")).shape == (2, 4, 4)
    with pytest.raises(ValueError, match="NumPy has no bfloat16, which images has"):
        some().to(dtype=torch.bfloat16).export(tmp_path / "half.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "empty", "file", "two.npz"]


def test_damaged_exports_are_named(tmp_path: Path) -> None:
    folder = some().export(tmp_path / "a")
    table = (folder / "labels.csv").read_text(encoding="utf-8")
    (folder / "labels.csv").write_text(table.replace("0/0.png", "../b.png"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"labels\.csv is damaged: '\.\./b\.png' is not in the folder"):
        LabeledImages.load(folder)
    (folder / "labels.csv").write_text("file,label\n0/0.png,one\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"labels\.csv is damaged"):
        LabeledImages.load(folder)
    (folder / "set.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"set\.json is damaged"):
        LabeledImages.load(folder)
    (folder / "set.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no set\.json.*distillkit\.data\.load_folder"):
        LabeledImages.load(folder)
    np.savez(tmp_path / "b.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"not an exported LabeledImages: it holds x"):
        LabeledImages.load(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes(some().export(tmp_path / "d.npz").read_bytes()[:300])
    with pytest.raises(ValueError, match=r"c\.npz is damaged"):
        LabeledImages.load(tmp_path / "c.npz")
    with pytest.raises(FileNotFoundError, match=r"e\.npz does not exist"):
        LabeledImages.load(tmp_path / "e.npz")
