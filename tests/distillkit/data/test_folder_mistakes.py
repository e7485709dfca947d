"""Folders that were read wrongly without a message: transparent pictures and folders that are no classes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from distillkit import LabeledImages
from distillkit.data import load_folder, open_folder
from distillkit.normalization import IDENTITY
from tests.pictures import class_folder, picture, save
from tests.refused import refused


def drawing(mode: str) -> Image.Image:
    """Return a black ring, which only the transparency shows, in a mode."""
    alpha = np.zeros((6, 6), dtype=np.uint8)
    alpha[1:5, 1:5], alpha[2:4, 2:4] = 255, 128
    if mode == "P":
        indexed = Image.fromarray((alpha == 0).astype(np.uint8), mode="P")
        indexed.putpalette([0, 0, 0, 10, 20, 30])
        indexed.info["transparency"] = 1
        return indexed
    image = Image.new("L" if mode == "LA" else "RGB", (6, 6))
    image.putalpha(Image.fromarray(alpha))
    return image


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pictures_need_a_background(tmp_path: Path, mode: str) -> None:
    opaque = picture(0, 6, 6) if mode == "LA" else picture(0)
    save(tmp_path / "a" / "0.png", opaque)
    drawing(mode).save(tmp_path / "a" / "1.png")
    open_cached = partial(open_folder, cache=tmp_path.parent / f"{tmp_path.name}.cache")
    for read in (load_folder, open_cached):
        with pytest.raises(ValueError, match=r"a/1\.png: some of its pixels are transparent.*background=1 for white"):
            read(tmp_path, test_fraction=0.0)
        for background in (0.0, 1.0, 0.2):
            train = read(tmp_path, test_fraction=0.0, background=background, normalization=IDENTITY).train
            images = (train if isinstance(train, LabeledImages) else train.read()).images
            assert np.array_equal((images[0] * 255).round().byte().permute(1, 2, 0), opaque.reshape(6, 6, -1))
            assert torch.allclose(images[1, :, 0], torch.tensor(background), atol=0.002)
            assert float(images[1, :, 1, 1:5].max()) == 0  # opaque black
            half = 0.0 if mode == "P" else background / 2
            assert torch.allclose(images[1, :, 2:4, 2:4], torch.tensor(half), atol=0.004)
    for wrong in (1.5, -0.1, True):
        with pytest.raises((ValueError, TypeError), match="background"):
            load_folder(tmp_path, background=wrong)


def test_a_folder_above_the_classes_is_refused(tmp_path: Path) -> None:
    class_folder(tmp_path / "data" / "pets")
    with pytest.raises(
        ValueError, match=r"only the class 'pets', whose pictures are in sub-folders \(cat, dog\).*/pets'"
    ):
        load_folder(tmp_path / "data")
    with pytest.raises(ValueError, match=r"only the class 'data'.*give the folder above them: '.*/data/pets'"):
        load_folder(tmp_path)
    class_folder(tmp_path / "split" / "pets" / "train")
    class_folder(tmp_path / "split" / "pets" / "test")
    with pytest.raises(ValueError, match=r"only the class 'pets'.*\(test, train\).*/split/pets'"):
        load_folder(tmp_path / "split")
    class_folder(tmp_path / "twice" / "train" / "pets")
    refused(lambda: load_folder(tmp_path / "twice"), ValueError, r"only the class 'pets'.*/twice/train/pets'")
    assert load_folder(class_folder(tmp_path / "one", ("cat",))).classes == ("cat",)


def test_layouts_of_competitions_are_refused(tmp_path: Path) -> None:
    def layout(name: str, folders: tuple[str, ...], *tables: str) -> Path:
        path = class_folder(tmp_path / name, folders)
        for table in tables:
            (path / table).write_text("file,label\n0,n\n1,8\n", encoding="utf-8")
        return path

    with pytest.raises(
        ValueError, match=r"train, trainResized beside trainLabels\.csv, which probably holds the labels"
    ):
        load_folder(layout("a", ("train", "trainResized"), "trainLabels.csv"))
    with pytest.raises(ValueError, match=r"test_images, train_images, which look like splits, not like classes"):
        load_folder(layout("b", ("train_images", "test_images")))
    with pytest.raises(ValueError, match=r"images beside labels\.csv.*sort the pictures into one folder per class"):
        load_folder(layout("c", ("images",), "labels.csv"))
    refused(lambda: load_folder(layout("d", ("train",))), ValueError, "look like splits")
    for classes in (("bus", "train"), ("testudo", "trainers", "valley"), ("cat", "dog")):
        assert load_folder(layout(f"e{len(classes)}{classes[0]}", classes)).classes == classes
    assert load_folder(layout("f", ("cat", "dog"), "sizes.csv")).classes == ("cat", "dog")


def test_cache_may_not_be_among_the_pictures(tmp_path: Path) -> None:
    """It would be a class without pictures in the next call."""
    class_folder(tmp_path / "pets", each=1)
    (tmp_path / "link").symlink_to(tmp_path / "pets")
    for cache in (tmp_path / "pets", tmp_path / "pets" / "cat" / "cache", tmp_path / "link" / "cache"):
        refused(
            partial(open_folder, tmp_path / "pets", cache=cache, test_fraction=0.0), ValueError, "cache must not be in"
        )
    assert len(open_folder(tmp_path / "pets", cache=tmp_path / "pets-cache", test_fraction=0.0).train) == 2


def test_class_must_keep_a_training_picture(tmp_path: Path) -> None:
    for k, (name, count) in enumerate((("cat", 2), ("dog", 9))):
        class_folder(tmp_path, (name,), count, 100 * k)
    refused(
        partial(load_folder, tmp_path, test_fraction=0.8), ValueError,
        "test_fraction=0.8 leaves no training picture of 1 of 2 classes, such as cat",
    )  # fmt: skip
    assert load_folder(tmp_path, test_fraction=0.7).train.counts().tolist() == [1, 3]
