from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from distillkit import LabeledImages, Normalization
from distillkit.data import Split, as_domains, clients, load, load_domains, load_folder, partition
from distillkit.normalization import IDENTITY
from tests.pictures import class_folder, picture, save
from tests.refused import refused

HALF = Normalization([0.5], [0.5])


def folder(path: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 5) -> Path:
    """Write pictures that differ between folders."""
    return class_folder(path, classes, each, 1000 * sum(map(ord, path.name)))


def split(classes: tuple[str, ...], labels: list[int], value: float, **options: Any) -> Split:
    """Return pictures of one colour, 3x4x4, with their own normalization."""
    own = Normalization([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    pixels = torch.full((len(labels), 3, 4, 4), value)
    data = LabeledImages.from_pixels(pixels, labels, normalization=own, num_classes=len(classes), info={"dataset": "x"})
    return Split(data, data[:1].replace(info={"dataset": "y", "hold_out": "random"}), classes, **options)


@pytest.mark.parametrize("options", [{}, {"hold_out": "content", "test_fraction": 0.4}], ids=["random", "content"])
def test_three_folders_are_three_clients(options: dict[str, Any], tmp_path: Path, global_rng_untouched: None) -> None:
    places = {name: folder(tmp_path / name, each=5 + k) for k, name in enumerate(("south", "north", "east"))}
    joined = load_domains(places, **options)
    assert joined.domains == ("south", "north", "east")
    assert joined.classes == ("cat", "dog")
    assert options or [len(part) for part in joined] == [8 + 10 + 12, 2 + 2 + 2]
    for part, data in (("train", joined.train), ("test", joined.test)):
        parts = partition.by_domain(data.columns["domain"])
        for mine, path in zip(clients(data, parts), places.values(), strict=True):
            alone = getattr(load_folder(path, **options), part)
            assert torch.equal(mine.labels, alone.labels)
            torch.testing.assert_close(mine.pixels(), alone.pixels(), rtol=0, atol=1e-6)
            assert mine.normalization == joined.train.normalization
    assert joined.train.mean == pytest.approx(Normalization.of(joined.train.pixels()).mean, abs=1e-6)
    assert joined.train.normalization.measured
    assert joined.test.info == {
        "dataset": "south+north+east",
        "domains": ["south", "north", "east"],
        "sources": [{"dataset": name, "test_fraction": 0.2, "hold_out": "random"} | options for name in places],
        "hold_out": options.get("hold_out", "random"),
        "classes": "folders",
        "split": "test",
    }


def test_a_folder_of_sources_like_the_retina_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("REFUGE", "Drishti.v1"):
        for part, each in (("Training", 3), ("Testing", 2)):
            folder(tmp_path / name / part, ("Glaucoma", "Normal"), each)
    retina = load_domains("~", size=8, normalization=HALF)
    assert retina.domains == ("Drishti.v1", "REFUGE")
    assert retina.train.shape == (3, 8, 8)
    assert [data.columns["domain"].tolist() for data in retina] == [[0] * 6 + [1] * 6, [0] * 4 + [1] * 4]
    assert retina.train.normalization == HALF


def test_names_npz_and_splits_can_be_joined(tmp_path: Path) -> None:
    digits = load("digits")
    arrays = {"images": np.zeros((10, 8, 8, 3), np.uint8), "labels": np.arange(10)}
    np.savez(tmp_path / "own.npz", **{f"{p}_{k}": v for p in ("train", "test", "val") for k, v in arrays.items()})
    [entry] = os.scandir(tmp_path)
    sources = {"digits": digits, "own": entry}
    joined = load_domains(sources, size=16, channels=3, normalization=HALF)
    assert joined.train.columns["domain"].bincount().tolist() == [len(digits.train), 10]
    assert joined.validation is not None
    assert joined.validation.columns["domain"].tolist() == [1] * 10  # counts in the sources, not in those that have one
    named = load_domains(["digits"], size=16, channels=3, normalization=HALF)
    torch.testing.assert_close(named.train.images, joined.train.images[: len(digits.train)])
    assert named.domains == ("digits",)
    refused(lambda: load_domains(["mnist"], root=tmp_path), FileNotFoundError, f"mnist is not complete in {tmp_path}:")
    assert load_domains({"own": tmp_path / "own.npz"}, classes=list("jihgfedcba")).classes == tuple("jihgfedcba")


def test_classes_are_matched_by_name(global_rng_untouched: None) -> None:
    one, other = split(("cat", "dog"), [0, 1, 1], 0.0), split(("dog", "cat"), [0, 1, 1], 1.0)
    joined = as_domains({"one": one, "other": other}, normalization=HALF)
    assert joined.classes == ("cat", "dog")
    facts = {"dataset": "one+other", "domains": ["one", "other"], "sources": [{"dataset": "x"}] * 2}
    assert [part.info for part in joined] == [{**facts, "split": "train"}, {**facts, "split": "test"}]
    assert joined.train.labels.tolist() == [0, 1, 1, 1, 0, 0]
    assert joined.train.columns["domain"].tolist() == [0, 0, 0, 1, 1, 1]
    torch.testing.assert_close(joined.train.images[:, 0, 0, 0], torch.tensor([-1.0, -1, -1, 1, 1, 1]))
    stated = as_domains({"a": one, "b": split(("dog",), [0], 1.0)}, classes=["dog", "cow", "cat"], normalization=HALF)
    assert stated.classes == ("dog", "cow", "cat")
    assert stated.train.labels.tolist() == [2, 0, 0, 0]
    rows = LabeledImages.from_pixels(torch.zeros(1, 3, 4, 4), torch.tensor([[0.1, 0.2, 0.3]]), normalization=HALF)
    multi = as_domains({"a": Split(rows, rows, ("a", "b", "c"))}, classes=("c", "a", "d", "b"), normalization=HALF)
    assert torch.equal(multi.train.labels, torch.tensor([[0.3, 0.1, 0.0, 0.2]]))
    with pytest.raises(ValueError, match="labels of different kinds"):
        as_domains({"a": one, "c": one, "b": Split(rows, rows, ("cat", "dog", "cow"))}, classes=("cat", "dog", "cow"))


def test_a_class_count_that_was_derived_is_still_derived() -> None:
    derived = LabeledImages.from_pixels(torch.rand(2, 3, 4, 4, generator=torch.Generator()), [0, 1])
    source = Split(derived, derived, ("0", "1"))
    assert not as_domains({"a": source}).train.classes_given
    assert as_domains({"a": source}, classes=("0", "1")).train.classes_given
    stated = Split(*(data.replace(num_classes=2, classes_given=True) for data in source), ("0", "1"))
    assert [as_domains({"a": one, "b": stated}).train.classes_given for one in (stated, source)] == [True, False]


def test_hold_outs_and_guarantees_of_all_sources_count() -> None:
    plain = split(("x",), [0], 0.0)
    part: dict[str, Split] = {
        made: Split(plain.train.replace(info={"hold_out": made}), plain.test, ("x",)) for made in ("content", "random")
    }
    for names, whole in ((["content"] * 2, "content"), (["content", "random"], "random"), (["random"] * 2, "random")):
        joined = as_domains({str(k): part[name] for k, name in enumerate(names)})
        assert joined.train.info["hold_out"] == whole
    private = plain.train.replace(info={"epsilon": 1.0, "delta": 1e-5})
    for train, test in ((plain.train, private), (private, plain.train), (private, private)):
        joined = as_domains({"a": Split(train, test, ("x",))})
        assert joined.test.info["epsilon"] == (2.0 if train is test else None)


def test_background_reaches_the_folders(tmp_path: Path) -> None:
    (tmp_path / "a" / "cat").mkdir(parents=True)
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "a" / "cat" / "0.png")
    joined = load_domains({"a": tmp_path / "a"}, background=0.4, test_fraction=0.0, normalization=IDENTITY)
    assert torch.allclose(joined.train.images, torch.tensor(102 / 255))


def test_a_source_without_a_test_set_is_allowed(tmp_path: Path) -> None:
    places = {"a": folder(tmp_path / "a"), "b": folder(tmp_path / "b"), "c": split(("cow",), [0], 0.5)}
    (tmp_path / "b" / "cow").mkdir()
    joined = load_domains(places, size=4, test_fraction=0.0, classes=["dog", "cow", "cat"])
    assert (joined.train.counts().tolist(), len(joined.test)) == ([10, 1, 10], 1)


SIX = {name: split(tuple(name), [0], 0.0) for name in ("abcdef", "ghijkl")}


@pytest.mark.parametrize(
    ("splits", "options", "error", "words"),
    [
        ({}, {}, ValueError, "at least one source"),
        ([], {}, TypeError, "splits must map names"),
        ({"a": "here"}, {}, TypeError, "'a' is str"),
        ({"a": split(("x",), [0], 0.0), "b": split(("y",), [0], 0.0)}, {}, ValueError, "'b' lacks x and has y"),
        ({"a": split(("x", "y"), [0], 0.0), "b": split(("y",), [0], 0.0)}, {}, ValueError, "'b' lacks x; rename"),
        ({"a": split(("y",), [0], 0.0), "b": split(("x", "y"), [0], 0.0)}, {}, ValueError, "'b' has x; rename"),
        ({"a": split(("x", "y"), [0], 0.0)}, {"classes": ("y",)}, ValueError, "'a' has x"),
        ({"a": split(("x",), [0], 0.0)}, {"classes": ("x", "x")}, ValueError, r"at least one, got \['x', 'x'\]"),
        ({"a": split(("x",), [0], 0.0)}, {"classes": []}, ValueError, r"at least one, got \[\]"),
        (SIX, {}, ValueError, "classes, a, b, c, d, e, f, but .* lacks a, b, c, d, e and has g, h, i, j, k; rename"),
        ({"a": split(("x",), [0], 0.0)}, {"classes": "x"}, TypeError, "classes must be a list"),
        ({"a": split(("x",), [0], 0.0)}, {"size": 0}, ValueError, "size must be"),
        ({"a": split(("x",), [0], 0.0)}, {"channels": 2}, ValueError, "channels must be"),
    ],
)
def test_incompatible_sources_are_refused(splits: Any, options: Any, error: type[Exception], words: str) -> None:
    refused(lambda: as_domains(splits, **options), error, words)


def test_different_shapes_are_refused_with_the_remedy(tmp_path: Path) -> None:
    places = {"colour": folder(tmp_path / "colour"), "grey": tmp_path / "grey"}
    for name in ("cat", "dog"):
        save(tmp_path / "grey" / name / "0.png", picture(ord(name[0]), 6, 6))
    words = r"'colour' is \[3, 6, 6\].*'grey' is \[1, 6, 6\]; give channels="
    refused(lambda: load_domains(places, test_fraction=0), ValueError, words)
    assert load_domains(places, channels=3, test_fraction=0).train.shape == (3, 6, 6)
    assert as_domains({"a": split(("x",), [0], 0.5)}, channels=1).train.shape == (1, 4, 4)
    for channels, remedy in ((3, "size="), (None, "channels=1 or")):
        with pytest.raises(ValueError, match=f"'digits' is .*; give {remedy}"):
            load_domains({"a": split(tuple("0123456789"), [0], 0.0), "digits": load("digits")}, channels=channels)


def test_missing_and_invalid_sources_are_named(tmp_path: Path) -> None:
    folder(tmp_path / "north")
    with pytest.raises(FileNotFoundError, match=r"sources are missing: south \(.*/south\), east \("):
        load_domains({name: tmp_path / name for name in ("north", "south", "east")})
    refused(lambda: load_domains(tmp_path / "nowhere"), FileNotFoundError, "no folder")
    with pytest.raises(FileNotFoundError, match=f"^{tmp_path}/north/cat has no sub-folders; expected one per source"):
        load_domains(tmp_path / "north" / "cat")
    folder(tmp_path / "one" / "train")
    refused(lambda: load_domains(tmp_path / "one"), ValueError, "is one dataset, with a train folder; .* load_folder")
    refused(lambda: load_domains([str(tmp_path)]), ValueError, r"load your own pictures .* load_domains\(\{name: path")
    twice = ["mnist", "digits", "digits"]
    refused(lambda: load_domains(twice), ValueError, r"distinct, got \['mnist', 'digits', 'digits'\]")
    refused(lambda: load_domains({"a": ""}), ValueError, r"sources\['a'\] must be the path of")
    (tmp_path / "notes.txt").touch()
    refused(lambda: load_domains({"a": tmp_path / "notes.txt"}), ValueError, r"notes\.txt is damaged or not an \.npz")
    refused(lambda: load_domains({"a": 5}), TypeError, "sources must be name -> path or Split, but 'a' is a int")
    refused(lambda: load_domains(5), TypeError, "sources must be a list")
