"""`leaks`: copies, close images and the nearest-image attack, against plain loops and sets with known answers."""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attacks import Leaks, leaks, psnr
from attacks.membership import nearest
from attacks.reporting._rates import evaluate_scores
from attacks.reporting.copies import _levels, _views, find_copies
from attacks.reporting.published_set import digests
from attacks.statistics import OperatingPoint, Rate
from distillkit import LabeledImages, Normalization
from distillkit.data import open_npz
from distillkit.rng import derive
from distillkit.sets import StoredImages, Tiles
from tests.fl.emulated_device import DEVICE, on_second_device, second_device
from tests.refused import refused

SPACE = Normalization((0.4,), (0.2,))


def drawn(seed: int, n: int, *, space: Normalization = SPACE) -> LabeledImages:
    pixels = torch.rand(n, 1, 4, 4, generator=derive(seed))
    return LabeledImages.from_pixels(pixels, torch.arange(n) % 2, num_classes=2, normalization=space)


def moved(data: LabeledImages, seed: int, scale: float) -> LabeledImages:
    noise = scale * torch.randn(data.images.shape, generator=derive(seed)).sign()
    return data.replace(images=data.normalization.encode((data.pixels() + noise).clamp(0, 1)))


TRAIN, ASIDE = drawn(0, 300), drawn(1, 250)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 5e-3, 0.03, 0.054, 0.07])
def test_shares_are_at_least_those_of_a_plain_loop(scale: float) -> None:
    turned = moved(ASIDE[:3].replace(images=ASIDE.images[:3].flip(-1)), 6, 0.05)
    small = LabeledImages.concatenate([moved(TRAIN[:6], 5, scale), drawn(2000, 4), turned])
    found = leaks(small, TRAIN, ASIDE)
    assert (found.images, found.close_held_out >= 3 / 13) == (13, True)
    both = [find_copies(small.pixels(), data.pixels()) for data in (TRAIN, ASIDE)]
    for data, copies in zip((TRAIN, ASIDE), both):
        best = [float(psnr(x.expand(len(data), -1, -1, -1), data.pixels()).max()) for x in small.pixels()]
        assert all(a > min(b, 90) - 1e-2 and c >= (b > 48.14) for a, b, c in zip(copies.level, best, copies.copied))
    close, held_out = (float((one.level >= 25).double().mean()) for one in both)
    copied = float(both[0].copied.double().mean())
    assert (found.copies, found.close, found.close_held_out) == pytest.approx((copied, close, held_out))
    scores = [nearest(small.pixels(), data.pixels()) for data in (TRAIN, ASIDE)]
    assert (found.auc, found.nearest) == evaluate_scores(scores[0], scores[1], 2)
    assert found.altered == evaluate_scores(both[0].record_level, both[1].record_level, 2)[1]


@pytest.mark.filterwarnings("ignore:held_out holds 20 records")
def test_sets_may_be_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    small, train, aside = TRAIN[5:9], TRAIN[:9], ASIDE[:20]
    wanted = leaks(small, train, aside)

    def compared(*own: torch.Tensor) -> Any:
        assert all(map(on_second_device, own))
        return find_copies(*(one.to("cpu") for one in own))

    monkeypatch.setattr("attacks.reporting.published_set.find_copies", compared)
    with second_device():
        assert leaks(small.to(DEVICE), train, aside) == leaks(small, train.to(DEVICE), aside, device=DEVICE) == wanted


def test_only_used_records_are_rated() -> None:
    small, used = TRAIN[30:50], torch.arange(30, 50)
    found = [leaks(small, TRAIN, ASIDE, used=u) for u in (None, used.byte(), used.repeat(2))]
    for rates in ([one.nearest.tpr for one in found], [one.altered.tpr for one in found]):
        assert [rate.trials for rate in rates] == [300, 20, 20]
        assert rates[1].hits == 20
        assert rates[0].hits < 30


def test_stored_records_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LabeledImages.concatenate([TRAIN, ASIDE])
    pixels = (whole.pixels() * 255).round().to(torch.uint8)
    small = LabeledImages.from_pixels(pixels[:10], whole.labels[:10], num_classes=2, normalization=SPACE)
    parts = [
        LabeledImages.from_pixels(x, y, num_classes=2, normalization=SPACE)
        for x, y in zip(pixels.split(300), whole.labels.split(300), strict=True)
    ]
    wanted = leaks(small, *parts).record()
    monkeypatch.setattr("attacks.reporting.published_set._VALUES", 16 * 7)
    assert leaks(small, *parts).record() == wanted
    arrays = {}
    for name, x, y in zip(("train", "test"), pixels.split(300), whole.labels.split(300), strict=True):
        arrays |= {f"{name}_images": x.permute(0, 2, 3, 1).numpy(), f"{name}_labels": y.numpy()}
    np.savez(tmp_path / "a.npz", **arrays)
    stored = open_npz(tmp_path / "a.npz", normalization=SPACE, cache=tmp_path / "cache")
    reads: list[int] = []
    read = StoredImages.read

    def counted(self: StoredImages, rows: Any = None) -> LabeledImages:
        found = read(self, rows)
        reads.append(len(found))
        return found

    monkeypatch.setattr(StoredImages, "read", counted)
    assert leaks(small, stored.train, stored.test).record() == wanted
    assert max(reads) == 7
    assert sum(reads) == 2 * 550  # once to see that no record is in both


def test_equal_records_are_told_from_those_of_sixteen_bits() -> None:
    pixels = torch.full((1, 1, 2, 2), 32768 / 65535)
    assert digests(pixels - 1e-7) == digests(pixels + 1e-7) != digests(pixels + 3e-5)


def point(hits: int, false: int) -> OperatingPoint:
    return OperatingPoint(0.5, Rate.of(hits, 100), Rate.of(false, 200), False)


def test_every_number_is_in_its_place() -> None:
    made = Leaks(200, "", 0.125, 0.5, 0.25, point(70, 3), 0.9, point(60, 5))
    rates = [str(rate) for one in (made.nearest, made.altered) for rate in (one.tpr, one.fpr)]
    assert [cells[1] for cells in made.table().cells] == ["it leaks", "12.5 %", "50.0 %", "25.0 %", *rates]
    assert [k for k, (name, _) in enumerate(made.table().cells) if "held-out" in name] == [3, 5, 7]
    assert str(made).splitlines()[1] == "images that copy a training record             12.5 %"
    assert repr(made) == str(made)
    assert "\n".join(name for name, _ in made.table().cells[1:]) == (
        "images that copy a training record\nimages within 25 dB of a training record\n"
        "images within 25 dB of a held-out record\nused records that the attack `nearest` reveals\n"
        "held-out records that it takes for used ones\nused records with a copy, maybe altered\n"
        "held-out records that seem to have one"
    )
    record = made.record()
    assert [record[name] for name in ("images", "copies", "within_25_db", "within_25_db_of_held_out")] == [
        200, 0.125, 0.5, 0.25,
    ]  # fmt: skip
    assert record["nearest"] == {"tpr": asdict(made.nearest.tpr), "fpr": asdict(made.nearest.fpr), "auc": 0.9}
    assert record["altered"] == {"tpr": asdict(made.altered.tpr), "fpr": asdict(made.altered.fpr)}


@pytest.mark.parametrize(
    ("changes", "leaks_something"),
    [
        ({}, False), ({"publishes": "data"}, True), ({"copies": 0.005}, True), ({"close": 0.13}, False),
        ({"close": 0.135}, True), ({"nearest": point(10, 3)}, True), ({"altered": point(10, 3)}, True),
    ],
)  # fmt: skip
def test_each_kind_of_leak_is_enough(changes: dict[str, Any], leaks_something: bool) -> None:
    nothing = Leaks(200, "", 0.0, 0.05, 0.05, point(3, 3), 0.5, point(3, 3))
    assert replace(nothing, **changes).found is leaks_something


def pictures(seed: int, shape: tuple[int, int, int], n: int = 200) -> LabeledImages:
    """Return smooth random pictures of 8 bits, whose channels differ."""
    c, h, w = shape
    coarse = [torch.randn(n, c, k, k, generator=derive(seed, k)) for k in (3, 6)]
    sums = sum(F.interpolate(x, size=(h, w), mode="bilinear") for x in coarse)
    return LabeledImages.from_pixels(rounded(torch.sigmoid(1.5 * sums)), torch.arange(n) % 2, num_classes=2)


def rounded(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels.clamp(0, 1) * 255).round() / 255


def tiled(pixels: torch.Tensor, factor: int = 2) -> torch.Tensor:
    n, c, h, w = pixels.shape
    size = h // factor, w // factor
    small = F.avg_pool2d(pixels, 2) if factor == 2 else F.interpolate(pixels, size, mode="bilinear", antialias=True)
    rows = small.view(n // factor**2, factor, factor, c, *size)
    return rows.permute(0, 3, 1, 4, 2, 5).reshape(n // factor**2, c, h, w)


ALTERED: dict[str, Any] = {
    "mirrored": lambda x: x.flip(-1),
    "upside down": lambda x: x.rot90(2, (2, 3)),
    "a quarter turn": lambda x: x.rot90(1, (2, 3)),
    "shifted": lambda x: F.pad(x, (3, 0, 0, 1))[:, :, 1:, : x.shape[3]],
    "inverted": lambda x: 1 - x,
    "darkened": lambda x: rounded(0.2 * x),
    "less contrast": lambda x: rounded(0.4 + 0.3 * x),
    "gray": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "channels exchanged": lambda x: x.roll(1, 1),
    "several": lambda x: rounded(1 - 0.5 * torch.roll(x.flip(-1), (1, -2), (2, 3))),
    "four tiles": tiled,
    "nine tiles": lambda x: tiled(x, 3),
    "decoded tiles": lambda x: Tiles(2).decode(Tiles(2).encode(x)),
    "turned and shifted": lambda x: torch.roll(x.rot90(1, (2, 3)), (1, 1), (2, 3)),
    "turned tiles": lambda x: 1 - tiled(x.flip(-1)),
}


@pytest.mark.parametrize("name", ALTERED)
def test_altered_copies_are_found(name: str) -> None:
    shape = (1, 24, 36) if name in {"shifted", "darkened", "four tiles", "upside down"} else (3, 24, 24)
    shape = (1, 40, 56) if name == "inverted" else shape  # compared at a lower resolution
    real, other = pictures(0, shape).pixels(), pictures(1, shape).pixels()
    altered = ALTERED[name](real[:36])
    found = find_copies(torch.cat([other[:9], altered]), real)
    assert found.copied.tolist() == [False] * 9 + [True] * len(altered)
    assert float(found.level[9:].min()) > 35 > 25 > float(found.level[:9].max())
    assert int((found.record_level[:36] > 35).sum()) >= 34
    assert int((found.record_level[36:] > 25).sum()) <= 16


def test_parts_of_the_pairs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pictures(0, (3, 24, 24)).pixels()[:8]
    sent = torch.cat([ALTERED[name](real[:4]) for name in ("mirrored", "four tiles", "several")])
    whole = asdict(find_copies(sent, real))
    monkeypatch.setattr("attacks.reporting.copies._PAIRS", 3)
    for elements in (8 * 7, 3):  # less than one image, too
        monkeypatch.setattr("attacks.reporting.copies._ELEMENTS", elements)
        for name, values in asdict(find_copies(sent, real)).items():
            torch.testing.assert_close(values, whole[name])


@pytest.mark.parametrize("channels", [1, 3])
def test_level_of_a_pair_is_that_after_the_best_change_of_colors(channels: int) -> None:
    """The share of the variance left by least squares, with a degree of freedom less for each number that is fitted."""
    g = derive(channels)
    x, noise = (torch.rand(12, channels, 6, 5, generator=g, dtype=torch.float64) for _ in range(2))
    x[3:6] = 0.5 + 0.1 * (x[3:6] - 0.5)
    x[6] = x[6].mean(0, keepdim=True)
    scale = torch.tensor([0.0, 0.015, 0.02, 0.0, 0.01, 0.3, 0.1, 0.0, 3.0, 0.1, 1.0, 0.005]).view(12, 1, 1, 1)
    y = 0.9 - 0.5 * x.roll(1, 1) + scale * noise
    y[7], y[9] = 0.3, 0.5 + 0.02 * (y[9] - 0.5)
    wanted = []
    for one, other in zip(y.flatten(2).mT.numpy(), x.flatten(2).mT.numpy()):
        design = np.column_stack([other, np.ones(30)])
        rest = ((one - design @ np.linalg.lstsq(design, one, rcond=None)[0]) ** 2).sum() * 30 / (29 - channels)
        power = ((one - one.mean(0)) ** 2).sum()
        share = min(1.0, max(1e-12, rest / power)) if power > 1e-9 else 1.0
        level = -10 * np.log10(share * max(((other - other.mean(0)) ** 2).mean(), 1 / 16))
        wanted.append((level, rest / one.size <= 255**-2 and share <= 0.01))
    level, equal = _levels(y, x)
    assert level.clamp(max=90).tolist() == pytest.approx([min(one, 90) for one, _ in wanted], abs=1e-3)
    assert equal.tolist() == [same for _, same in wanted]
    assert 3 <= int(equal.sum()) <= 7


@pytest.mark.parametrize(("shape", "reach"), [((8, 8), 2), ((8, 10), 2), ((5, 5), 0)])
def test_views_are_all_flips_turns_and_shifts(shape: tuple[int, int], reach: int) -> None:
    image = np.arange(shape[0] * shape[1]).reshape(shape)
    wanted = []
    for flip, turn in product((False, True), range(4) if shape[0] == shape[1] else (0, 2)):
        turned = np.rot90(np.fliplr(image) if flip else image, turn)
        far = reach if turn == 0 else min(reach, 1)
        for dy, dx in product(range(reach - far, reach + far + 1), repeat=2):
            wanted.append(turned[dy : dy + shape[0] - 2 * reach, dx : dx + shape[1] - 2 * reach].tolist())
    seen = [view(torch.from_numpy(image)[None, None])[0, 0].tolist() for view in _views(shape, reach)]
    assert sorted(seen) == sorted(wanted)


def test_tiles_of_few_pixels_are_not_compared() -> None:
    real = pictures(0, (1, 18, 36), 9).pixels()
    assert not find_copies(tiled(real, 3), real).copied.any()


@pytest.mark.parametrize("shape", [(3, 24, 24), (1, 24, 36)], ids=["color", "oblong"])
def test_other_pictures_are_no_altered_copies(shape: tuple[int, int, int]) -> None:
    found = leaks(pictures(2, shape, 40), pictures(0, shape), pictures(1, shape))
    assert found.copies == 0
    assert found.close <= 0.1
    assert not found.found


def test_what_a_set_says_is_reported() -> None:
    for said, text in (("real images", "real images"), (("a", 1), "a, 1"), (True, "data"), (None, ""), ([], "")):
        found = leaks(drawn(7, 20).replace(info={"publishes": said}), TRAIN, ASIDE)
        assert found.found is bool(text)
        assert found.record()["publishes"] == found.publishes == text
        end = f"it leaks; it publishes {text}" if text else "no leak found, smaller leaks remain possible"
        assert str(found).splitlines()[0].endswith(end)


JOINED = LabeledImages.concatenate
OTHER: Any = drawn(3, 20, space=Normalization((0.5,), (0.5,)))
BAD: list[tuple[Any, str]] = [
    ((TRAIN[:9], TRAIN, TRAIN), "train and held_out must not share records, but 300 of 300"),
    ((TRAIN[:9], TRAIN, JOINED([ASIDE, TRAIN[:3]])), "but 3 of 253 held-out records"),
    ((ASIDE[:9], TRAIN, JOINED([ASIDE, ASIDE[:2], TRAIN[:1]])), "must not share images, but 11 held-out records"),
    ((TRAIN, TRAIN[:9], ASIDE), "small contains all 9 records of train and more images"),
    ((OTHER, TRAIN, ASIDE), "small and train have different normalizations"),
    ((TRAIN[:5], TRAIN, OTHER), "small and held_out have different normalizations"),
    ((TRAIN[:5], TRAIN[:0], ASIDE), "train must hold at least 1 image, got 0"),
    ((TRAIN[:5], TRAIN, ASIDE[:1]), "held_out must hold at least 2 images, got 1"),
    ((TRAIN[[0, 0, 0]], TRAIN, ASIDE), "small must hold at least 2 different images to compare, but its 3 are all"),
    ((TRAIN[:0], TRAIN, ASIDE), "small must hold"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=range(len(BAD)))
def test_equal_exchanged_and_invalid_sets_are_refused(arguments: Any, said: str) -> None:
    refused(lambda: leaks(*arguments), ValueError, said)


def test_all_records_may_be_published() -> None:
    found = leaks(TRAIN, TRAIN, ASIDE)
    assert (found.found, found.copies) == (True, 1.0)
    assert leaks(JOINED([drawn(7, 20), TRAIN[:3]]), TRAIN[:9], ASIDE).copies == pytest.approx(3 / 23)  # not all


def test_few_held_out_records_and_rare_duplicates_are_named() -> None:
    with (
        pytest.warns(UserWarning, match="held_out holds 199 records; with fewer than 200") as few,
        pytest.warns(match="1 of 200") as shared,
    ):
        leaks(TRAIN[:9], TRAIN, JOINED([ASIDE[:199], TRAIN[50:51]]))
    assert {one.filename for one in (*few, *shared)} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leaks(TRAIN[:9], TRAIN, ASIDE[:200])
    for shared, others in ((1, ASIDE[:200]), (3, drawn(9, 297))):  # at most 1 %
        said = f"{shared} of {shared + len(others)} held-out records are also in train and are left out"
        with pytest.warns(UserWarning, match=said):
            found = leaks(TRAIN[:9], TRAIN, JOINED([TRAIN[8 : 8 + shared], others]))
        assert found.record() == leaks(TRAIN[:9], TRAIN, others).record()


def test_invalid_indices_are_named() -> None:
    refused(lambda: leaks(TRAIN[:5], TRAIN, ASIDE, device="odd"), ValueError, "device must be one that this machine")
    for used in (torch.tensor([300]), torch.tensor([-1]), torch.zeros(0, dtype=torch.int64), torch.tensor([[0]])):
        with pytest.raises(ValueError, match="used must hold at least one index of a record of train, 0 to 299"):
            leaks(TRAIN[:5], TRAIN, ASIDE, used=used)
    for used in (torch.tensor([0.0]), torch.tensor([True]), [0]):
        with pytest.raises(TypeError, match=f"used must be an int .* got {getattr(used, 'dtype', 'list')}"):
            leaks(TRAIN[:5], TRAIN, ASIDE, used=used)  # type: ignore[arg-type]
