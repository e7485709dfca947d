"""Laws of random draws: records, batches, crops, shifts and noise have their stated distributions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, permutations

import pytest
import torch
from scipy.stats import beta, chisquare, kstest, norm
from torch import Tensor

from distillkit import LabeledImages
from distillkit.augment import DSA, CropFlip, ResizedCrop
from distillkit.condense._condensation import Condensation
from distillkit.data._dirichlet import _log_gamma
from distillkit.data._hold_out import hold_out
from distillkit.generate import Patches
from distillkit.networks import FixedNetwork, build
from distillkit.normalization import IDENTITY
from distillkit.privacy import Secret
from distillkit.rng import derive
from distillkit.sets._class_index import random_rows

LEVEL = 1e-4
"""A correct draw fails one check with probability `LEVEL`; the seeds are fixed, so it fails always or never."""


def assert_equally_often(seen: Sequence[object], expected: Sequence[object]) -> None:
    counts = Counter(seen)
    assert set(counts) <= set(expected)
    assert chisquare([counts[value] for value in expected]).pvalue > LEVEL


def assert_subsets(draws: Sequence[Sequence[int]], total: int) -> None:
    """Draws without replacement: every record, and every pair of records, is in them equally often."""
    wanted = len(draws[0])
    assert all(len(set(draw)) == wanted for draw in draws)
    # They vary less than independent draws, by the factor (total - wanted) / (total - 1).
    counts, mean = Counter(r for draw in draws for r in draw), len(draws) * wanted / total
    shrink = ((total - wanted) / (total - 1)) ** 0.5
    assert set(counts) <= set(range(total))
    assert chisquare([mean + (counts[r] - mean) / shrink for r in range(total)]).pvalue > LEVEL
    if wanted == 2:
        assert_equally_often([tuple(sorted(draw)) for draw in draws], list(combinations(range(total), 2)))


def numbered(count: int) -> LabeledImages:
    """Return images whose pixels are their indices, of one class."""
    pixels = torch.arange(float(count)).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    return LabeledImages(pixels, torch.zeros(count, dtype=torch.int64), num_classes=1)


@pytest.mark.parametrize(("total", "wanted"), [(5, 2), (7, 6)])
def test_real_batches_are_uniform_subsets(total: int, wanted: int) -> None:
    net = build(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 1)), 0)
    run = Condensation(
        "law", numbered(total), FixedNetwork(net), ipc=1, init="noise", parametrize=None, classes=None, augment=None,
        lr=1.0, momentum=0.0, steps=0, generator=3, resume=None, callback=None, arguments={},
    )  # fmt: skip
    for limit in (wanted, total):
        with run.samples(limit, 2000, lambda step, c: (step, c, "real")) as read:
            draws = [read(step, 0)[:, 0, 0, 0].int().tolist() for step in range(2000)]
        if limit < total:
            assert_subsets(draws, total)
    assert draws[0] == list(range(total))


def test_rows_are_uniform_subsets_and_repeats_are_uniform() -> None:
    rows = {3: torch.arange(5)}
    assert_subsets([random_rows(rows, [2], derive(1, k))[0].tolist() for k in range(2000)], 5)
    drawn = [random_rows(rows, [7], derive(2, k)) for k in range(2000)]
    assert all(sorted(index[:5].tolist()) == list(range(5)) and short == [3] for index, short in drawn)
    assert_equally_often([int(r) for index, _ in drawn for r in index[5:]], range(5))
    assert [random_rows(rows, [n], derive(3))[1] for n in (4, 5, 6)] == [[], [], [3]]


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.93])
def test_records_take_part_independently(rate: float) -> None:
    secret, times = Secret(5), 3000
    drawn = torch.zeros(times, 8)
    for step in range(times):
        drawn[step, secret.poisson(8, rate)] = 1
    z = (drawn.mean(0) - rate) * (times / (rate * (1 - rate))) ** 0.5
    assert float(z.square().sum()) < norm.isf(LEVEL / 16) ** 2 * 8
    assert float(z.abs().max()) < norm.isf(LEVEL / 16)
    together = torch.corrcoef(drawn.T).triu(1)[torch.ones(8, 8).triu(1) > 0]
    assert float(together.abs().max()) < norm.isf(LEVEL / 56) / times**0.5
    sizes = drawn.sum(1)
    assert float(sizes.var() / (8 * rate * (1 - rate)) - 1) == pytest.approx(0, abs=6 * (2 / times) ** 0.5 + 0.1)
    assert not len(secret.poisson(8, 0.0))
    assert secret.poisson(8, 1.0).tolist() == list(range(8))


@pytest.mark.parametrize("std", [0.3, 2.0])
def test_noise_is_gaussian_with_the_stated_deviation(std: float) -> None:
    assert kstest(Secret(1).add_noise(torch.zeros(20_000), std), norm(0, std).cdf).pvalue > LEVEL


def patches(**options: object) -> list[object]:
    made = Patches(torch.rand(3, 6, 8, generator=derive(0)), 4, size=4, count=3000, **options)
    return [made.crop_parameters(i) for i in range(len(made))]


def test_crops_lie_anywhere_in_the_image() -> None:
    """With the whole square as crop, a square of 5 pixels in 6 x 8 has two rows and four columns to begin at."""
    made = patches(precrop=0.85, area=(1.0, 1.0), aspect=(1.0, 1.0))
    assert {(p.height, p.width) for p in made} == {(5, 5)}
    assert_equally_often([(p.top, p.left) for p in made], [(i, j) for i in range(2) for j in range(4)])
    inside = [p for p in patches(precrop=1.0, area=(0.11, 0.12), aspect=(1.0, 1.0)) if (p.height, p.width) == (2, 2)]
    assert len(inside) == 3000
    assert_equally_often([p.top for p in inside], range(5))
    counts = Counter(p.left for p in inside)  # three places of the square times five in it
    ways = Counter(a + b for a in range(3) for b in range(5))
    assert chisquare([counts[k] for k in ways], [3000 * ways[k] / 15 for k in ways]).pvalue > LEVEL


def test_crops_have_uniform_areas_angles_and_orders() -> None:
    made = Patches(torch.rand(3, 400, 400, generator=derive(0)), 4, size=4, count=2000, precrop=1.0, flip=0.3,
                   area=(0.1, 0.5), aspect=(1.0, 1.0), rotation=20.0, shear=10.0, jitter_probability=1.0)  # fmt: skip
    drawn = [made.crop_parameters(i) for i in range(len(made))]
    areas = [p.height * p.width / 400**2 for p in drawn]
    uniforms = [[(a - 0.1) / 0.4 for a in areas], [p.rotation / 40 + 0.5 for p in drawn],
                [p.shear / 20 + 0.5 for p in drawn]]  # fmt: skip
    for operation, strength in zip(("brightness", "contrast", "saturation", "hue"), made.jitter):
        uniforms.append([dict(p.jitter)[operation] / (2 * strength) + 0.5 for p in drawn])
    for values in uniforms:
        assert kstest(values, "uniform").pvalue > LEVEL
    names = ("brightness", "contrast", "saturation", "hue")
    assert_equally_often([tuple(o for o, _ in p.jitter) for p in drawn], list(permutations(names)))
    flipped = sum(p.flip for p in drawn)
    assert chisquare([flipped, 2000 - flipped], [600, 1400]).pvalue > LEVEL
    wide = patches(precrop=1.0, area=(0.2, 0.3), aspect=(0.5, 1.0))
    assert all(p.width <= p.height for p in wide)  # the aspect is width / height


def marked(shape: tuple[int, int], count: int = 3000) -> Tensor:
    """Return images of one bright pixel at (4, 3)."""
    images = torch.zeros(count, 1, *shape)
    images[:, 0, 4, 3] = 1
    return images


def places(images: Tensor) -> list[tuple[int, int]]:
    return [tuple(row) for row in images[:, 0].nonzero()[:, 1:].tolist()]


def test_crops_and_flips_of_training_images_are_uniform() -> None:
    shifted = CropFlip(IDENTITY, pad=1, flip=0.0)(marked((8, 6)), derive(0))
    assert_equally_often(places(shifted), [(i, j) for i in (3, 4, 5) for j in (2, 3, 4)])
    moved = DSA("crop", crop=0.25)(marked((9, 8)), derive(1))
    assert_equally_often(places(moved), [(i, j) for i in range(2, 7) for j in range(1, 6)])
    for augment in (CropFlip(IDENTITY, pad=0, flip=0.3), DSA("flip", flip=0.3)):
        mirrored = sum(place == (4, 2) for place in places(augment(marked((8, 6)), derive(2))))
        assert chisquare([mirrored, 3000 - mirrored], [900, 2100]).pvalue > LEVEL


def test_resized_crops_have_uniform_areas_and_log_uniform_aspects() -> None:
    """Those of at most 3/4 of the area always fit; of the others, the first that fits is taken, at any place."""
    top, left, height, width = ResizedCrop(0.2)._boxes(3000, 400, 400, derive(0))
    share, aspect = height * width / 400**2, (width / height).log() / math.log(16 / 9)
    small = share < 0.74
    for values in ((share[small] - 0.2) / 0.54, aspect[small] + 0.5):
        assert kstest(values, "uniform").pvalue > LEVEL
    for place, size in ((top, height), (left, width)):
        assert kstest((place + 0.5) / (400 - size + 1), "uniform").pvalue > LEVEL
    large = (height == 400) & (width == 400)
    assert 0.5 < float(small.double().mean()) < 0.9
    assert float(large.double().mean()) < 0.01  # the whole image only if none of ten fits


@pytest.mark.parametrize(("side", "length"), [(6, 3), (6, 2), (5, 2), (5, 3)])
def test_cutouts_are_centred_on_uniform_pixels(side: int, length: int) -> None:
    """A square of odd length is centred on a pixel, one of even length on a corner, of the image's border too."""
    seen = DSA("cutout", cutout=length / side)(torch.ones(3000, 1, side, side), derive(length))
    starts = range(-(length // 2), side - length // 2 + (1 - length % 2))
    rows = {s: tuple(not s <= r < s + length for r in range(side)) for s in starts}
    assert len(set(rows.values())) == len(rows)
    hidden = seen[:, 0].bool().all(2)  # rows without a hidden pixel
    covered = [tuple(row) for row, some in zip(hidden.tolist(), (~seen.bool()).flatten(1).any(1)) if some]
    visible = [s for s in starts if not all(rows[s])]
    assert_equally_often(covered, [rows[s] for s in visible])


def test_every_family_is_drawn_equally_often() -> None:
    augment, images = DSA("crop_flip_cutout", flip=1.0), torch.ones(1, 1, 8, 8)
    images[..., :4] = 2.0

    def family(seed: int) -> str:
        seen = augment(images, derive(seed), siamese=True)
        kept, mirrored = torch.equal(seen, images), torch.equal(seen, images.flip(3))
        return "flip" if mirrored else "cutout or crop" if not kept else "nothing"

    flips = sum(family(seed) == "flip" for seed in range(1500))
    assert chisquare([flips, 1500 - flips], [500, 1000]).pvalue > LEVEL
    last = DSA("flip_color", flip=1.0)
    coloured = sum(not torch.equal(last(images, derive(s), siamese=True), images.flip(3)) for s in range(1500))
    assert chisquare([coloured, 1500 - coloured]).pvalue > LEVEL


@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
def test_shares_of_a_class_have_the_law_of_dirichlet(alpha: float) -> None:
    """A share of one client out of three is a beta variable with alpha and 2 alpha."""
    shares = _log_gamma(alpha, (5000, 3), derive(0)).softmax(1)
    for client in range(3):
        assert kstest(shares[:, client], beta(alpha, 2 * alpha).cdf).pvalue > LEVEL


@pytest.mark.parametrize("fraction", [0.2, 0.37])
def test_held_out_images_lie_anywhere(fraction: float) -> None:
    """Of every class its own share, rounded to the nearest number, at uniform places."""
    sizes = [1000, 1003, 7, 4, 1]
    labels = torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)])
    kept, held_out = hold_out(labels, fraction)
    assert torch.equal(torch.cat([kept, held_out]).sort().values, torch.arange(len(labels)))
    assert labels[held_out].bincount(minlength=5).tolist() == [round(fraction * n) for n in sizes]
    for k, first in ((0, 0), (1, 1000)):
        own = held_out[labels[held_out] == k] - first
        assert kstest(own / sizes[k], "uniform").pvalue > LEVEL


def test_checks_notice_wrong_draws() -> None:
    wrong: list[Callable[[], None]] = [
        lambda: assert_equally_often([0, 1, 1] * 500, range(2)),
        lambda: assert_subsets([[0, 1], [2, 3]] * 500, 4),
        lambda: assert_subsets([[0, 0]] * 500, 4),
    ]
    for check in wrong:
        with pytest.raises(AssertionError):
            check()
