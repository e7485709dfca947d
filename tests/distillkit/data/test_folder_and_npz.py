from __future__ import annotations

import gc
import os
import shutil
import warnings
import zipfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from distillkit import LabeledImages, Normalization
from distillkit.data import load_domains, load_folder, load_npz, open_folder, open_npz
from distillkit.data._hold_out import hold_out_content, record_digests
from distillkit.normalization import IDENTITY
from tests.pictures import Array, bytes_of, class_folder, npz_arrays, picture, save
from tests.refused import refused
from tests.stored import require_same_set

NAMES = [("train", "test", "val"), ("Train", "Test", "Val"), ("training", "testing", "validation")]
NAMES += [("TRAIN", "test", "Valid")]


@pytest.mark.parametrize("names", NAMES)
def test_a_folder_with_splits(names: tuple[str, ...], tmp_path: Path) -> None:
    for shift, name in enumerate(names):
        class_folder(tmp_path / "pets" / name, shift=1000 * shift, each=3 - shift)
    split = load_folder(tmp_path / "pets" / names[0] / "..")
    parts = {"train": split.train, "test": split.test, "validation": split.validation}
    for shift, (part, data) in enumerate(parts.items()):
        assert data is not None
        seeds = [1000 * shift + 100 * k + i for k in range(2) for i in range(3 - shift)]
        assert np.array_equal(bytes_of(data.pixels()), np.stack([picture(seed) for seed in seeds]))
        assert data.labels.tolist() == [seed % 1000 // 100 for seed in seeds]
        assert data.normalization == split.train.normalization
        assert data.info == {"dataset": "pets", "split": part, "classes": "folders"}
    measured = Normalization.of(split.train.pixels())
    assert (*split.train.mean, *split.train.std) == pytest.approx((*measured.mean, *measured.std), abs=1e-6)
    assert split.classes == ("cat", "dog")


def test_a_folder_without_a_test_split_holds_out_a_fixed_part(tmp_path: Path, global_rng_untouched: None) -> None:
    class_folder(tmp_path, each=10)
    split = load_folder(tmp_path)
    assert split.train.counts().tolist() == [8, 8]
    assert split.test.counts().tolist() == [2, 2]
    assert split.test.info["test_fraction"] == 0.2
    everything = {x.tobytes() for s in split for x in bytes_of(s.pixels())}
    assert everything == {picture(100 * k + i).tobytes() for k in range(2) for i in range(10)}
    assert torch.equal(load_folder(tmp_path).test.images, split.test.images)
    whole = load_folder(tmp_path, test_fraction=0.0)
    assert (len(whole.train), len(whole.test), whole.test.num_classes) == (20, 0, 2)
    stored = torch.from_numpy(bytes_of(whole.train.pixels())).permute(0, 3, 1, 2)
    chosen = hold_out_content(record_digests(stored), 0.4, "test")[1]
    by_content = load_folder(tmp_path, hold_out="content", test_fraction=0.4).test
    assert np.array_equal(bytes_of(by_content.pixels()), bytes_of(whole.train[chosen].pixels()))
    for fraction in (1.0, -0.1):
        refused(partial(load_folder, tmp_path, test_fraction=fraction), ValueError, "test_fraction must be")
    refused(lambda: load_folder(tmp_path, classes=[]), ValueError, "classes must have at least one name")


def test_train_may_be_alone_or_the_name_of_a_class(tmp_path: Path) -> None:
    split = load_folder(class_folder(tmp_path / "a" / "train").parent)
    assert (split.classes, [len(part) for part in split]) == (("cat", "dog"), [8, 2])
    assert load_folder(class_folder(tmp_path / "b", ("_plane", "train"))).classes == ("_plane", "train")


def test_skipped_files_are_counted(tmp_path: Path) -> None:
    class_folder(tmp_path / "train")
    class_folder(tmp_path / "test", each=1)
    class_folder(tmp_path / "spare")
    (tmp_path / "third").mkdir()
    for place in ("train/dog", "train/cat", "test/dog"):
        (tmp_path / place / "notes.txt").touch()
    for name in ("deeper/x.PNG", ".hidden.png", ".cache/x.png"):
        save(tmp_path / "train" / "cat" / name, picture(9))
    (tmp_path / "train" / ".git").mkdir()
    with pytest.warns(UserWarning, match="folders beside its splits, which are not read: spare, third$"):
        split = load_folder(tmp_path)
    assert len(split.train) == 11
    assert split.train.info["files_ignored"] == 3
    assert split.train.info["folders_ignored"] == ["spare", "third"]
    class_folder(class_folder(tmp_path / "b" / "train").parent / "x")
    with pytest.warns(UserWarning, match="not read: x$"):
        info = load_folder(tmp_path / "b").train.info
    assert (info["folders_ignored"], "files_ignored" in info) == (["x"], False)


def test_a_class_may_be_absent_from_test_but_not_from_train(tmp_path: Path) -> None:
    class_folder(tmp_path / "Training")
    class_folder(tmp_path / "test", ("dog",))
    assert load_folder(tmp_path).test.counts().tolist() == [0, 5]
    class_folder(tmp_path / "test", ("cow",))
    class_folder(tmp_path / "val", ("cow",))
    words = "2 classes that the training split does not have: test/cow, val/cow"
    refused(lambda: load_folder(tmp_path), ValueError, words)
    words = "2 folders that are not in classes; add or move them: test/cow, val/cow"
    refused(lambda: load_folder(tmp_path, classes=("cat", "dog", "Cow")), ValueError, words)
    (tmp_path / "Training" / "cow").mkdir()
    (tmp_path / "Training" / "cow" / "notes.txt").touch()
    refused(lambda: load_folder(tmp_path), FileNotFoundError, r"1 missing pictures \(\.png, .*\) in .*: Training/cow$")


def test_endings_of_pictures(tmp_path: Path) -> None:
    for i, ending in enumerate(["png", "jpg", "jpeg", "bmp", "gif", "ppm", "pgm", "tif", "tiff", "webp", "PNG"]):
        save(tmp_path / "cat" / f"{i}.{ending}", picture(i))
    for ending in ("avif", "dcm", "heic", "heif", "jfif", "jp2", "npy", "npz", "svg", "txt"):
        (tmp_path / "cat" / f"x.{ending}").touch()
    with pytest.warns(UserWarning, match="9 files in .* are not read, such as x.avif; convert"):
        assert len(load_folder(tmp_path, test_fraction=0).train) == 11


def test_splits_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    class_folder(tmp_path / "a" / "train")
    class_folder(tmp_path / "a" / "Training")
    class_folder(tmp_path / "a" / "test")
    refused(lambda: load_folder(tmp_path / "a"), ValueError, "several folders for train: Training, train; keep one")
    for name in ("test", "Val", "validation", "testing"):
        class_folder(tmp_path / name / "x", ("cat", "dog", name))
        with pytest.raises(ValueError, match=f"x has {name}, but no train folder with class folders in it"):
            load_folder(tmp_path / name / "x")
    class_folder(tmp_path / "flat", ("test", "train"))
    refused(lambda: load_folder(tmp_path / "flat"), ValueError, "flat has test, but no train folder with class folders")


def test_an_empty_or_flat_test_is_refused(tmp_path: Path) -> None:
    class_folder(tmp_path / "train")
    (tmp_path / "test").mkdir()
    refused(lambda: load_folder(tmp_path), ValueError, "no pictures; expected test/class/picture.png, or no test at")
    for name in ("a.png", "B.PNG", ".c.png"):
        (tmp_path / "test" / name).touch()
    refused(lambda: load_folder(tmp_path), ValueError, "test holds 2 pictures but no class folders")
    class_folder(tmp_path / "test")
    with pytest.warns(UserWarning, match="2 pictures in .*test itself, beside the class folders, are not read"):
        assert len(load_folder(tmp_path).test) == 10
    for name in ("x.HEIC", "y.heic", "z.txt"):
        (tmp_path / "train/cat" / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"2 files in .*train are not read, such as x\.HEIC"):
        load_folder(tmp_path)
    (tmp_path / "test/dog/9.png").write_bytes(b"x")
    refused(lambda: load_folder(tmp_path), ValueError, r"- 1 pictures that cannot be read: test/dog/9.png \(")


def test_a_fraction_without_test_pictures_is_refused_and_untested_classes_are_reported(tmp_path: Path) -> None:
    class_folder(tmp_path, each=1)
    class_folder(tmp_path, ("dog",), each=2, shift=100)
    refused(lambda: load_folder(tmp_path), ValueError, "fraction=0.2 holds out no picture: the largest class has 2;")
    class_folder(tmp_path, ("cow",), each=5)
    class_folder(tmp_path, "efgh", each=1, shift=300)
    with pytest.warns(UserWarning, match="of 6 of 7 classes, which will not be tested: cat, dog, e, f, g$"):
        assert load_folder(tmp_path).test.counts().tolist() == [0, 1, *[0] * 5]


def test_a_folder_of_several_datasets_is_reported(tmp_path: Path) -> None:
    for k, site in enumerate(sites := ("north", "south", "west", "xy")):
        class_folder(tmp_path / "sites" / site, ("cat", "dog", "eel")[: 3 - k // 3], shift=1000 * k)
    words = rf"classes north, south, west, xy, and each .* cat, dog; .*load_folder\('{tmp_path}/sites/north'\) or"
    with pytest.warns(UserWarning, match=words):
        assert load_folder(tmp_path / "sites").classes == sites
    assert load_domains({"north": str(tmp_path / "sites" / "north")}).classes == ("cat", "dog", "eel")


@pytest.mark.parametrize("below", [["images"], ["a of {}", "a"], ["a", "b", ""], ["images/a", "images/b"]])
def test_nested_pictures_are_read_without_warning_in_the_order_of_their_paths(below: list[str], tmp_path: Path) -> None:
    seeds = {}
    for k, (name, inner) in enumerate(product(("cat", "dog"), below)):
        class_folder(tmp_path / name, (inner.format(name),), shift=100 * k)
        seeds |= {Path(name, inner.format(name), f"{i}.png"): 100 * k + i for i in range(5)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = load_folder(tmp_path, test_fraction=0.0)
        shutil.rmtree(tmp_path / "dog")
        assert load_folder(tmp_path, test_fraction=0.0, classes=split.classes).train.counts()[1] == 0
    assert split.classes == ("cat", "dog")
    assert np.array_equal(bytes_of(split.train.pixels()), np.stack([picture(seeds[path]) for path in sorted(seeds)]))


def test_links(tmp_path: Path) -> None:
    class_folder(tmp_path / "pets")
    class_folder(tmp_path / "elsewhere", ("deep", "cow"))
    (tmp_path / "pets" / "cow").symlink_to(tmp_path / "elsewhere" / "cow")
    (tmp_path / "pets" / "cat" / "9.png").symlink_to(tmp_path / "elsewhere" / "deep" / "0.png")
    assert load_folder(tmp_path / "pets", test_fraction=0.0).train.counts().tolist() == [6, 5, 5]
    (tmp_path / "pets" / "dog" / "in").mkdir()
    (tmp_path / "pets" / "dog" / "in" / "deep").symlink_to(tmp_path / "elsewhere" / "deep")
    with pytest.warns(UserWarning, match="dog/in has links to folders, which are not followed: deep"):
        load_folder(tmp_path / "pets")
    for place in ("dog/in", "cat"):
        (tmp_path / "pets" / place / "8.png").symlink_to(tmp_path / "gone.png")
    words = r"2 missing targets of links; repair or delete them: cat/8\.png, dog/in/8\.png$"
    refused(lambda: load_folder(tmp_path / "pets"), FileNotFoundError, words)


def test_missing_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: load_folder(tmp_path / "nowhere"), FileNotFoundError, "no folder .*nowhere; expected class/picture")
    refused(lambda: load_folder(tmp_path), FileNotFoundError, "has no sub-folders")
    (tmp_path / "cat").mkdir()
    refused(lambda: load_folder(tmp_path), FileNotFoundError, "- 1 missing pictures .* in class folders: .*/cat$")
    monkeypatch.setattr(os, "scandir", open)  # which refuses folders
    refused(lambda: load_folder(tmp_path), IsADirectoryError, "Is a directory: .*/cat'")


def test_pictures_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    class_folder(tmp_path)
    save(tmp_path / "dog" / "9.png", picture(9, 7, 8, 3))
    words = r"without the \(6, 6\) pixels .* of cat/0\.png and 9 more; give size=.*: dog/9\.png$"
    refused(lambda: load_folder(tmp_path), ValueError, words)
    save(tmp_path / "cat" / "0.png", picture(9, 8, 8, 3))  # the first picture may be the odd one
    words = r"2 pictures without the \(6, 6\) .* of cat/1\.png and 8 more.*: cat/0\.png, dog"
    refused(lambda: load_folder(tmp_path), ValueError, words)
    assert load_folder(tmp_path, size=(4, 5)).train.shape == (3, 4, 5)
    for k in range(4):
        save(tmp_path / "oblong" / "cat" / f"{k}.png", picture(k, 6, 4 + k // 3, 3))
    refused(lambda: load_folder(tmp_path / "oblong"), ValueError, r"1 pictures without the \(6, 4\) pixels .*: cat/3")


def test_grey_and_colour_need_channels(tmp_path: Path) -> None:
    class_folder(tmp_path)
    grey = save(tmp_path / "dog" / "9.png", picture(9, 6, 6))
    words = r"1 pictures without the 3 channels of cat/0\.png and 9 more; give channels=1 or channels=3: dog/9\.png$"
    refused(lambda: load_folder(tmp_path), ValueError, words)
    colour = load_folder(tmp_path, channels=3, test_fraction=0.0).train
    assert np.array_equal(bytes_of(colour.pixels())[-1], np.repeat(grey[..., None], 3, 2))


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
        for background in (0.0, 1.0, 0.25):
            train = read(tmp_path, test_fraction=0.0, background=background, normalization=IDENTITY).train
            images = (train if isinstance(train, LabeledImages) else train.read()).images
            assert np.array_equal((images[0] * 255).round().byte().permute(1, 2, 0), opaque.reshape(6, 6, -1))
            assert torch.allclose(images[1, :, 0], torch.tensor(background), atol=0.002)
            assert float(images[1, :, 1, 1:5].max()) == 0  # opaque black
            half = 0.0 if mode == "P" else background / 2
            assert torch.allclose(images[1, :, 2:4, 2:4], torch.tensor(half), atol=0.004)
        with pytest.raises(ValueError, match=r"a/1\.png: some of its pixels are transparent.*background=1 for white"):
            read(tmp_path, test_fraction=0.0)
    for wrong in (1.5, -0.1, True):
        refused(partial(load_folder, tmp_path, background=wrong), (ValueError, TypeError), "background")


def test_a_folder_above_the_classes_is_refused(tmp_path: Path) -> None:
    class_folder(tmp_path / "data" / "pets")
    (tmp_path / "data" / "pets" / ".0.png").touch()
    words = r"only the class 'pets', whose pictures are in sub-folders \(cat, dog\).*/pets'"
    refused(lambda: load_folder(tmp_path / "data"), ValueError, words)
    refused(lambda: load_folder(tmp_path), ValueError, r"the class 'data'.*\(cat, dog\).*above them: '.*/data/pets'")
    save(class_folder(tmp_path / "deep" / "a" / "b", ("c",)) / "0.png", picture(9))
    refused(lambda: load_folder(tmp_path / "deep"), ValueError, r"the class 'a'.*\(b\).*above them: '.*/deep/a'")
    class_folder(tmp_path / "split" / "pets" / "train")
    class_folder(tmp_path / "split" / "pets" / "test")
    refused(lambda: load_folder(tmp_path / "split"), ValueError, r"the class 'pets'.*\(test, train\).*/split/pets'")
    class_folder(tmp_path / "twice" / "train" / "pets")
    refused(lambda: load_folder(tmp_path / "twice"), ValueError, r"only the class 'pets'.*/twice/train/pets'")
    save(tmp_path / "one" / "cat" / "deep" / "9.png", picture(9))
    assert load_folder(class_folder(tmp_path / "one", ("cat",))).classes == ("cat",)


def test_layouts_of_competitions_are_refused(tmp_path: Path) -> None:
    def layout(name: str, folders: tuple[str, ...], *tables: str) -> Path:
        path = class_folder(tmp_path / name, folders)
        for table in tables:
            (path / table).write_text("file,label\n0,n\n1,8\n", encoding="utf-8")
        return path

    words = r"train, trainResized beside trainLabels.CSV, z.csv, which .* load_table\('.*/trainLabels.CSV"
    refused(lambda: load_folder(layout("a", ("train", "trainResized"), "z.csv", "trainLabels.CSV")), ValueError, words)
    words = "Train_images, test_images, which look like splits, not like classes"
    refused(lambda: load_folder(layout("b", ("Train_images", "test_images"))), ValueError, words)
    words = r"images beside labels\.\w+, .*/labels\.\w+', folder='.*/train/images'\).*sort the pictures into"
    for table in ("labels.csv", "../labels.csv", "labels.tsv", "labels.xls", "labels.xlsx", "labels.parquet"):
        where = layout(f"{table.replace('/', '')}/train", ("images",), table).parent
        refused(partial(load_folder, where), ValueError, words)
    refused(lambda: load_folder(layout("d", ("train",))), ValueError, "look like splits")
    for classes in (("bus", "train"), ("testudo", "trainers", "valley"), ("cat", "dog")):
        assert load_folder(layout(f"e{len(classes)}{classes[0]}", classes)).classes == classes
    assert load_folder(layout("f", ("cat", "dog"), "sizes.csv")).classes == ("cat", "dog")


def test_cache_may_not_be_among_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a class without pictures in the next call."""
    class_folder(tmp_path / "pets", ("cat",), each=1, shape=(6, 6))
    (tmp_path / "link").symlink_to(tmp_path / "pets")
    for cache in (tmp_path / "pets", tmp_path / "pets" / "cat" / "cache", tmp_path / "link" / "cache"):
        monkeypatch.setenv("DISTILLKIT_CACHE", str(cache))
        for option in ({"cache": cache}, {}):
            with pytest.raises(ValueError, match=f"cache must not be in the folder .*/pets, got {cache}$"):
                open_folder(tmp_path / "pets", **option, test_fraction=0.0)
    assert len(open_folder(tmp_path / "pets", cache=tmp_path / "pets-cache", test_fraction=0.0).train) == 1


def test_class_must_keep_a_training_picture(tmp_path: Path) -> None:
    for k, (name, count) in enumerate((("cat", 2), ("cow", 1), ("dog", 9))):
        class_folder(tmp_path, (name,), count, 100 * k)
    call = partial(load_folder, tmp_path, test_fraction=0.8, classes=["ewe", "dog", "cow", "cat"])
    refused(call, ValueError, "test_fraction=0.8 leaves no training picture of 2 of 4 classes, such as cow;")


def write_npz(path: Path, **found: Array) -> Path:
    np.savez(path / "tiny.npz", **found)
    return path / "tiny.npz"


@pytest.mark.parametrize("channels", [(), (1,), (3,)])
@pytest.mark.parametrize("val", [False, True])
def test_npz_of_classes(tmp_path: Path, channels: tuple[int, ...], val: bool) -> None:
    found = npz_arrays((5, 3, *channels), val=val)
    split = load_npz(write_npz(tmp_path, **found))
    assert split.classes == ("0", "1", "2")
    assert split.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert split.train.shape == (*(channels or (1,)), 5, 3)
    assert np.array_equal(bytes_of(split.test.pixels()).reshape(found["test_images"].shape), found["test_images"])
    assert split.train.normalization == split.test.normalization
    assert split.train.mean == pytest.approx(Normalization.of(split.train.pixels()).mean, abs=1e-6)
    assert split.test.info == {"dataset": "tiny", "split": "test"}
    assert (split.validation is not None) == val


def test_npz_of_rows_and_with_the_largest_label_in_test(tmp_path: Path) -> None:
    found = npz_arrays()
    found["test_labels"][0] = 7
    assert load_npz(write_npz(tmp_path, **found)).train.num_classes == 8
    found |= {key: np.eye(2, dtype=int)[held[:, 0] % 2] for key, held in found.items() if "labels" in key}
    split = load_npz(write_npz(tmp_path, **found))
    assert torch.equal(split.train.labels, torch.from_numpy(found["train_labels"]).float())
    assert (split.train.classes_given, split.classes) == (True, ("0", "1"))


def test_npz_of_floats_flat_labels_and_names(tmp_path: Path) -> None:
    found = npz_arrays()
    for part in ("train", "test"):
        found[f"{part}_images"] = found[f"{part}_images"] / 255.0
        found[f"{part}_labels"] = found[f"{part}_labels"][:, 0].astype(np.int32)
    split = load_npz(write_npz(tmp_path, **found), classes=("a", "b", "c", "d"))
    assert (split.train.num_classes, split.classes[3]) == (4, "d")
    assert np.allclose(split.train.pixels()[:, 0], found["train_images"], atol=1e-6)
    for order in "<>":
        other = {key: held.astype(held.dtype.newbyteorder(order)) for key, held in found.items()}
        read = load_npz(write_npz(tmp_path, **other), classes=("a", "b", "c", "d")).train
        require_same_set(read, split.train)


@pytest.mark.parametrize("part", ["train", "test", "val"])
def test_equal_images_in_two_parts_or_classes_are_reported(tmp_path: Path, part: str) -> None:
    found = {key: held | 128 * key.endswith("images") for key, held in npz_arrays(val=True).items()}  # bright pictures
    for i in range(2):  # copies in other classes
        found[f"{part}_images"][-1 - i] = found["train_images"][1]
        found[f"{part}_labels"][-1 - i] = 2 * i
    name, total = "validation" if part == "val" else part, len(found[f"{part}_images"])
    count = 2 if part == "train" else 1
    expected = [f"{count} of {total} images of {name} are equal to others with another label; give"]
    expected += [] if part == "train" else [f"2 of {total} images of {name} are also in train, so the accuracy"]
    write_npz(tmp_path, **found)
    for key in ("train", "test", "val"):
        for i, (image, (label,)) in enumerate(zip(found[f"{key}_images"], found[f"{key}_labels"])):
            save(tmp_path / "folder" / key / str(label) / f"{i}.png", image)
    options: dict[str, Any] = {"cache": tmp_path / "cache", "progress": False}
    for load in (
        lambda: load_npz(tmp_path / "tiny.npz", normalization=Normalization([0.5], [0.5])),
        lambda: open_npz(tmp_path / "tiny.npz", **options),
        lambda: load_folder(tmp_path / "folder"),
        lambda: open_folder(tmp_path / "folder", **options),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            load()
        assert [str(w.message)[: len(words)] for w, words in zip(said, expected, strict=True)] == expected


def bad(key: str, value: Array) -> dict[str, Array]:
    return {**npz_arrays(), key: value}


def rows_of(value: int) -> dict[str, Array]:
    """Return arrays with multi-label rows, one of which holds `value`."""
    found = npz_arrays()
    found |= {key: np.zeros((len(held), 3), np.int64) for key, held in found.items() if key.endswith("labels")}
    found["train_labels"][1, 2] = value
    return found


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ({"train_labels": np.zeros(1), "test_images": np.zeros(1)}, "lacks train_images, .*; it holds test_images, t"),
        (bad("val_images", picture(0, 2, 5, 3)), "lacks val_labels"),
        ({}, "it holds nothing"),
        (bad("train_images", picture(0, 6, 5, 5, 4)), r"train_images must be .*got \[\d, 5, 5, 4\]"),
        (bad("train_images", picture(0, 6, 5, 5, 5, 3)), "train_images must be"),
        (bad("train_images", picture(0, 0, 5, 5)), "train_images must be"),
        (bad("test_images", picture(0, 4, 5, 0)), r"test_images must be .*got \[\d, 5, 0, 1\]"),
        (bad("test_images", np.zeros((4, 5, 3), np.int64)), "uint8 or float, got int64"),
        (bad("test_images", np.linspace(0.5, 1.5, 60).reshape(4, 5, 3)), "^test_images must .* got 0.5 to 1.5"),
        (bad("test_images", np.full((4, 5, 3), np.nan)), r"in \[0, 1\] if float"),
        (bad("train_labels", np.zeros((5, 1), np.uint8)), r"train_labels must be 6 integers .*uint8 \[5, 1\]"),
        (bad("train_labels", np.zeros(6)), "float64"),
        (bad("train_labels", np.zeros(6, bool)), "train_labels must be 6 integers .* got bool"),
        (bad("train_labels", np.array([{}] * 6)), "damaged or not an .npz of plain arrays"),
        (bad("train_labels", np.zeros((6, 2, 2), np.uint8)), "train_labels must be 6 integers"),
        ({**npz_arrays(val=True), "val_images": np.zeros((2, 5, 3), np.int64)}, "val_images must be uint8 or float"),
        ({**npz_arrays(val=True), "val_labels": np.zeros((3, 1), np.uint8)}, "val_labels must be 2 integers"),
        ({**npz_arrays(val=True), "val_labels": np.zeros((2, 4), np.uint8)}, "labels of different kinds"),
        (bad("train_labels", np.full(6, -1)), "labels must be at least 0"),
        (bad("train_labels", np.zeros((6, 4), np.uint8)), "labels of different kinds"),
        (bad("train_labels", np.array([0, 1, 2, 3, 0, 2**33])), "of tiny.npz must be .* from 0, got 8589934592"),
        (bad("test_images", np.zeros((4, 5, 3), np.longdouble)), "uint8 or float of at most 64 bits"),
        (rows_of(3), r"train_labels \[N, K\] must be rows of 0 and 1, got 0 to 3"),
        (rows_of(-1), r"rows of 0 and 1, got -1 to 0"),
    ],
)
def test_invalid_arrays_are_refused(tmp_path: Path, found: dict[str, Array], match: str) -> None:
    path = write_npz(tmp_path, **found)
    refused(lambda: load_npz(path), ValueError, match)
    refused(lambda: open_npz(path, cache=tmp_path / "cache", progress=False), ValueError, match)


def test_damaged_npz_are_closed_again(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "whole.npz", **npz_arrays())
    content = bytearray((tmp_path / "whole.npz").read_bytes())
    head = 30 + sum(int.from_bytes(content[i : i + 2], "little") for i in (26, 28))
    content[head] = 255  # no stream of zlib begins so
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name, held in (("train_images", b"\x93NUMPY\x01\x00\x0b\x00{'descr': ("), ("train_labels", b"no array")):
        with zipfile.ZipFile(tmp_path / f"{name}.npz", "w") as file:
            file.writestr(f"{name}.npy", held)  # a header that is cut off, or none
    damaged = [bytes(content), b"", b"PK\x03\x04 and then no zip"]
    damaged += [(tmp_path / name).read_bytes() for name in ("array.npy", "train_images.npz", "train_labels.npz")]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        for number, held in enumerate(damaged):
            (path := tmp_path / f"{number}.npz").write_bytes(held)
            for read in (load_npz, partial(open_npz, cache=tmp_path / "cache")):
                refused(partial(read, path), ValueError, f"{number}.npz is damaged or not an .npz")
        gc.collect()
    assert not [str(w.message) for w in said if str(tmp_path) in str(w.message)]
