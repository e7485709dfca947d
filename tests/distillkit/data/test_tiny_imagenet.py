from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from distillkit import Normalization
from distillkit.data import load, open_dataset
from tests.pictures import bytes_of, picture, save
from tests.refused import refused
from tests.stored import require_same

HALF = Normalization([0.5], [0.5])
tiny = partial(load, "tiny-imagenet")
WNIDS = ("n02", "n01")  # the release's list is not sorted


def write(root: Path) -> Path:
    folder = root / "tiny-imagenet-200"
    for k, wnid in enumerate(WNIDS):
        images = folder / "train" / wnid / "images"
        for i in range(4 - k):
            shape = (6, 6) if (k, i) == (1, 2) else ()
            save(images / f"{wnid}_{i}.{'JPEG' if i else 'png'}", picture(10 * k + i, *shape))
        (images / "notes.txt").write_text("no picture", encoding="utf-8")
    for i in range(2):
        save(folder / "val" / "images" / f"val_{i}.JPEG", picture(100 + i))
    lines = "val_0.JPEG\tn01\t0\t0\t7\t7\nval_1.JPEG\tn02\t1\t2\t3\t4\n"
    (folder / "val" / "val_annotations.txt").write_text(lines, encoding="utf-8")
    (folder / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in WNIDS), encoding="utf-8")
    words = "n00\tentity\nn01\tgoldfish, Carassius auratus\nn02\tespresso\n\n"
    (folder / "words.txt").write_text(words, encoding="utf-8")
    return folder


def test_the_released_layout(tmp_path: Path, global_rng_untouched: None) -> None:
    write(tmp_path)
    for name in ("tiny-imagenet", "TinyImageNet"):
        split = load(name, root=tmp_path, normalization=HALF)
        assert split.classes == ("goldfish, Carassius auratus", "espresso")
        assert split.train.labels.tolist() == [0] * 3 + [1] * 4
        assert split.test.labels.tolist() == [0, 1]
    assert split.train.shape == (3, 6, 6)
    stored = bytes_of(split.train.pixels())
    assert np.array_equal(stored[3], picture(0))
    assert np.array_equal(stored[2], np.repeat(picture(12, 6, 6)[..., None], 3, 2))
    assert split.test.info == {"dataset": "tinyimagenet", "split": "test"}
    assert tiny(root=tmp_path, size=4, channels=1).train.shape == (1, 4, 4)


def test_missing_files_are_named(tmp_path: Path) -> None:
    words = r"missing wnids\.txt, words\.txt, train, val/val_annotations\.txt, val/images; unpack"
    refused(lambda: tiny(root=tmp_path), FileNotFoundError, words)
    folder = write(tmp_path)
    annotations = folder / "val" / "val_annotations.txt"
    held = annotations.read_text(encoding="utf-8")
    annotations.write_text(held + "".join(f"x{i}.JPEG\tn01\t0\n" for i in range(7)), encoding="utf-8")
    words = r"missing x0\.JPEG, x1\.JPEG, x2\.JPEG, x3\.JPEG, x4\.JPEG and 2 more; unpack"
    refused(lambda: tiny(root=tmp_path), FileNotFoundError, words)
    annotations.write_text(held, encoding="utf-8")
    (folder / "val" / "images" / "val_1.JPEG").unlink()
    refused(lambda: tiny(root=tmp_path), FileNotFoundError, r"val/images: missing val_1\.JPEG; unpack")
    for file in (folder / "train" / "n01" / "images").iterdir():
        file.unlink()
    refused(lambda: tiny(root=tmp_path), FileNotFoundError, "train/n01/images holds no pictures")
    (folder / "train" / "n01" / "images").rmdir()
    refused(lambda: tiny(root=tmp_path), FileNotFoundError, "missing train/n01/images")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("words.txt", "n00\tentity\n", r"words\.txt must name each class of wnids\.txt, but lacks n01, n02;"),
        ("wnids.txt", "", r"words\.txt must name each class of wnids\.txt, but lacks all"),
        ("val/val_annotations.txt", "val_0.JPEG n01\n", "must hold lines picture<tab>class<tab>box, got 'val_0"),
        ("val/val_annotations.txt", "val_0.JPEG\tn03\t0\n", "must hold lines picture<tab>class<tab>box"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01 0\n", "must hold lines picture<tab>class<tab>box"),
        ("val/val_annotations.txt", "", r"val_annotations\.txt names no pictures"),
    ],
)
def test_files_of_another_layout_are_refused(file: str, text: str, words: str, tmp_path: Path) -> None:
    (write(tmp_path) / file).write_text(text, encoding="utf-8")
    refused(lambda: tiny(root=tmp_path), ValueError, words)


def test_stored_pictures_equal_loaded_ones(tmp_path: Path) -> None:
    write(tmp_path)
    opened = partial(open_dataset, root=tmp_path, normalization=HALF, cache=tmp_path / "cache")
    refused(lambda: opened("tiny-imagenet", workers=0), ValueError, "workers must be at least 1")
    require_same(opened("tiny-imagenet", workers=1), tiny(root=tmp_path, normalization=HALF))
    refused(lambda: opened("mnist"), ValueError, r"one of tinyimagenet, pathmnist, .*, got 'mnist'; .*load\(name\)")
