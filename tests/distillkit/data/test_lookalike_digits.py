from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distillkit import Normalization
from distillkit.data import DATASETS, Split, load, load_domains, lookalike_digits, mnist_m_like, synth_digits_like
from distillkit.data.lookalike_digits import _FONTS, _colours, _font, _mask
from distillkit.rng import derive
from tests.refused import refused

HALF = Normalization([0.5], [0.5])


def few() -> Split:
    digits = load("digits", size=(16, 14))
    return Split(digits.train[:40], digits.test[:10], digits.classes)


@pytest.mark.parametrize("chunk", [1024, 16])
def test_digits_are_blended_as_the_difference_to_a_crop(
    chunk: int, monkeypatch: pytest.MonkeyPatch, global_rng_untouched: None
) -> None:
    monkeypatch.setattr(lookalike_digits, "_CHUNK", chunk)
    photo = np.random.default_rng(0).integers(0, 256, (20, 18, 3), np.uint8)
    digits = few()
    made = mnist_m_like(digits, photos=[photo, 255 - photo, 0 * photo], normalization=HALF)
    crops = torch.from_numpy(photo).permute(2, 0, 1).float().div(255).unfold(1, 16, 1).unfold(2, 14, 1)
    crops = crops.permute(1, 2, 0, 3, 4).flatten(0, 1)
    crops = torch.cat([crops, 1 - crops, 0 * crops[:1]])  # all 25 of each photo, but for the black one
    used = []
    for part, data, own in zip(("train", "test"), made, digits, strict=True):
        for picture, digit in zip(data.pixels(), own.pixels(), strict=True):
            far = (crops - digit).abs().sub(picture).abs().flatten(1).amax(1)
            assert float(far.min()) < 1e-5
            used.append(int(far.argmin()))
        assert torch.equal(data.labels, own.labels)
        assert data.info == {"dataset": "digits-m-like", "photos": 3, "split": part}
        assert data.normalization == HALF
    first, second, black = ([k % 25 for k in used if k // 25 == photo] for photo in range(3))
    assert min(len(set(first)), len(set(second))) > 5 < len(black)  # top and left are independent
    assert {k // 5 for k in first + second} == {k % 5 for k in first + second} == set(range(5))
    assert first[:4] != second[:4]


def test_default_photos_and_seeds() -> None:
    digits = few()
    first, again, other = (mnist_m_like(digits, generator=seed).train for seed in (1, 1, 2))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert first.info["photos"] == 2
    twice = mnist_m_like(Split(digits.train, digits.train, digits.classes))
    assert not torch.equal(twice.train.images, twice.test.images)
    assert mnist_m_like(digits, photos=[np.zeros((16, 14, 3), np.uint8)]).train.shape == first.shape == (3, 16, 14)
    private = Split(digits.train, digits.test.replace(info={"epsilon": 1.0}), digits.classes)
    reason = "some of the joined images have no guarantee; photos of unknown origin (before: epsilon 1)"
    assert mnist_m_like(private).train.info["reason"] == reason
    for given, info, name in ((True, {}, "digits-m-like"), (False, {"dataset": "mnist"}, "mnistm-like")):
        known = Split(digits.train.replace(classes_given=given, info=info), digits.test, digits.classes)
        assert {(part.classes_given, part.info["dataset"]) for part in mnist_m_like(known)} == {(given, name)}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"digits": "mnist"}, TypeError, "digits must be a Split, as load"),
        ({"digits": load("digits", channels=3)}, ValueError, r"must be grey .*, got 3 channels; load them with"),
        ({"photos": []}, ValueError, "photos must be at least one"),
        ({"photos": np.zeros((30, 30, 3), np.uint8)}, ValueError, r"photos must be uint8 \[H, W, 3\], got torch.uint8"),
        ({"photos": [np.zeros((30, 30, 3))]}, ValueError, r"photos must be uint8 .*, got torch.float32 \[30, 30, 3\]"),
        ({"photos": ["china.jpg"]}, ValueError, "photos must be uint8 .*, got str"),
        ({"photos": [np.zeros((30, 30, 4), np.uint8)]}, ValueError, r"must be uint8 .*, got torch.uint8 \[30, 30, 4\]"),
        ({"photos": [np.zeros((30, w, 3), np.uint8) for w in (14, 13)]}, ValueError, r"digits, 16x14, got \[30, 13\]"),
        ({"photos": 3}, TypeError, "photos must be a list"),
    ],
)
def test_invalid_digits_and_photos_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    refused(lambda: mnist_m_like(**{"digits": few(), **options}), error, words)


def test_drawn_digits_are_balanced_coloured_and_reproducible(global_rng_untouched: None) -> None:
    first, again, other = (synth_digits_like(train=53, test=20, size=16, generator=seed) for seed in (0, 0, 1))
    assert torch.equal(first.train.images, again.train.images)
    assert not torch.equal(first.train.images, other.train.images)
    pairs = zip(*((part.images, part.labels) for part in synth_digits_like(train=20, test=20, size=16)))
    assert not any(torch.equal(one, other) for one, other in pairs)
    assert sorted(first.train.counts().tolist()) == [5] * 7 + [6] * 3
    assert first.train.labels[:10].tolist() != list(range(10))
    assert first.test.counts().tolist() == [2] * 10
    assert first.train.shape == (3, 16, 16)
    assert first.train.info == {"dataset": "synthdigits-like", "split": "train"}
    pixels = first.train.pixels().flatten(2)
    assert float((pixels.amax(2) - pixels.amin(2)).mean(1).min()) > 0.1  # every digit can be seen
    grounds = torch.cat([pixels, first.test.pixels().flatten(2)])[..., 0]
    assert len({tuple(ground) for ground in grounds.tolist()}) == 73
    stroke, ground = _colours(2000, derive(0))
    assert 0.25 <= float((stroke - ground).abs().mean(1).min()) < 0.27  # any colours with this mean difference
    assert float((stroke - ground).mean(1).abs().min()) < 0.1


def test_digits_are_moved_turned_and_blurred_within_their_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(lookalike_digits, "_mask", lambda *a, **g: seen.append((*a, g)) or torch.zeros(8, 8))
    made = synth_digits_like(train=500, test=10, size=8)
    texts, faces, sizes, forms = zip(*seen)
    left, digits, right = zip(*texts)
    assert list(map(int, digits)) == [*made.train.labels.tolist(), *made.test.labels.tolist()]
    assert set(left) == set(right) == {"", *"0123456789"}
    assert any(one != other for one, other in zip(left, right) if one and other)
    shown = torch.tensor([[one != "", other != ""] for one, other in zip(left, right)])
    assert all(abs(float(part) - 0.25) < 0.1 for part in shown.unique(dim=0, return_counts=True)[1] / 510)
    assert (set(faces), set(sizes)) == (set(_FONTS), {8})
    drawn = torch.tensor([[one["height"], one["turn"], *one["shift"], one["blur"]] for one in forms])
    low, high = torch.tensor([0.5, -20, -0.1, -0.1, 0]), torch.tensor([0.9, 20, 0.1, 0.1, 1.2])
    near = 0.02 * (high - low)
    assert float((drawn.T.corrcoef() - torch.eye(5)).abs().max()) < 0.2
    assert bool((drawn.amin(0) - low <= near).all() & (drawn.amin(0) >= low).all())
    assert bool((high - drawn.amax(0) <= near).all() & (drawn.amax(0) <= high).all())


def test_neighbours_stand_beside_the_digit_which_is_blurred_and_moved() -> None:
    plain = {"height": 0.5, "turn": 0.0, "shift": (0.0, 0.0), "blur": 0.0}

    def mask(left: str = "", right: str = "", size: int = 32, **changes: Any) -> torch.Tensor:
        return _mask([left, "8", right], "DejaVuSans", size, **{**plain, **changes})

    def spread(picture: torch.Tensor) -> float:
        """Return the variance of the column of the ink."""
        columns = picture.sum(0) / picture.sum()
        place = torch.arange(float(len(columns)))
        return float(columns @ place**2 - (columns @ place) ** 2)

    alone, columns = mask(), torch.arange(32).view(1, -1)
    for one, beyond in ((mask(left="1"), columns < 10), (mask(right="1"), columns > 21)):
        assert float(((one - alone) * beyond).sum()) > 10
        assert torch.allclose(one * ~beyond, alone * ~beyond, atol=0.02)
    rows, columns = (alone.sum(d).nonzero().flatten() for d in (1, 0))
    assert 14 <= int(rows[-1] - rows[0]) <= 18
    moved = mask(shift=(0.0625, -0.125))
    assert torch.allclose(moved.roll((4, -2), (0, 1)), alone, atol=0.02)
    for size in (32, 64):  # a blur in pixels of a picture of 32
        wider = spread(mask(size=size, blur=1.2)) - spread(mask(size=size))
        assert wider == pytest.approx((1.2 * size / 32) ** 2, rel=0.1)
    assert float((mask(turn=20.0) - alone).abs().amax()) > 0.5
    assert torch.allclose(mask(turn=20.0), mask(turn=-20.0).flip(1), atol=0.35)


def test_all_faces_have_their_own_ten_digits() -> None:
    seen = set()
    for face in _FONTS:
        font = _font(face, 40)
        assert face[:2].lower() == font.getname()[0][:2].lower()
        shapes = {bytes(font.getmask(str(digit))) for digit in range(10)}
        assert len(shapes) == 10
        assert bytes(font.getmask("\uffff")) not in shapes
        seen.add(bytes(font.getmask("8")))
    assert len(seen) == len(_FONTS)


@pytest.mark.parametrize(("option", "least"), [("train", 10), ("test", 10), ("size", 8)])
def test_numbers_below_the_least_are_refused(option: Any, least: int) -> None:
    refused(lambda: synth_digits_like(**{option: least - 1}), ValueError, f"{option} must be at least {least}, got")


def test_lookalikes_are_domains_by_name_with_their_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"train": 20, "test": 10, "size": 8, "normalization": None, "generator": 0}
    monkeypatch.setattr(lookalike_digits.synth_digits_like, "__kwdefaults__", given)
    digits, asked = few(), list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr("distillkit.data.datasets.load", lambda name, **given: asked.append((name, given)) or digits)
        blended = DATASETS["mnistmlike"].load(Path("here"), download=True, normalization=HALF)
    assert asked == [("mnist", {"root": Path("here"), "download": True})]
    for split, own in ((blended, mnist_m_like(digits)), (load("synthdigits-like"), synth_digits_like())):
        for part, other in zip(split, own, strict=True):
            torch.testing.assert_close(part.pixels(), other.pixels(), rtol=0, atol=1e-6)
    joined = load_domains(["digits", "synthdigits-like"], size=8, channels=3, normalization=HALF)
    assert joined.domains == ("digits", "synthdigits-like")
    assert joined.train.columns["domain"].bincount().tolist() == [1438, 20]
    assert joined.train.info["sources"][1] == {"dataset": "synthdigits-like"}
