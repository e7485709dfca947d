"""Checks of possible but implausible input: refused or warned of, without false alarms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit import LabeledImages, Normalization, plot
from distillkit._sanity_checks import check_logits, check_perturbed
from distillkit._utils.user_warnings import without_warnings
from distillkit.augment import DSA, require_augmentation
from distillkit.condense import distribution_matching, gradient_matching, herding, random_subset
from distillkit.evaluate import evaluate
from distillkit.networks import ConvNet, RandomNetworks
from distillkit.normalization import IDENTITY, ZCA
from distillkit.rng import derive
from distillkit.select import select
from distillkit.sets import as_set
from distillkit.training import Protocol
from tests.refused import refused

HALF = Normalization([0.5], [0.25])
COLOUR = Normalization([0.49, 0.48, 0.45], [0.25, 0.24, 0.26])


def pixels(n: int = 6, c: int = 1, h: int = 8, w: int = 8) -> torch.Tensor:
    return torch.rand(n, c, h, w, generator=derive(0))


def marks(n: int = 6) -> torch.Tensor:
    return torch.arange(n) % 3


@pytest.fixture(autouse=True)
def _every_warning_is_an_error() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@given(st.sampled_from([None, IDENTITY, HALF, COLOUR]), st.integers(0, 99), st.integers(1, 9), st.integers(1, 9))
def test_valid_sets_cause_no_warning(normalization: Normalization | None, seed: int, h: int, w: int) -> None:
    raw = torch.rand(4, 3, h, w, generator=derive(seed))
    raw[0, :, 0, 0] = 0.0
    LabeledImages.from_pixels(raw, [0, 1, 0, 1], normalization=normalization or IDENTITY)
    LabeledImages.from_pixels(raw.requires_grad_(), [1] * 4, num_classes=3, normalization=normalization or IDENTITY)
    encoded = raw if normalization is None else normalization.encode(raw)
    made = LabeledImages(encoded, [0, 1, 0, 1], normalization=normalization)
    made.replace(images=made.images * 300)
    LabeledImages(encoded, [1, 2, 1, 2], num_classes=3, normalization=normalization)


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "standardised, not said": (
        lambda: as_set(COLOUR.encode(pixels(c=3)), marks()),
        r"images range from -1\.\d+ to 2\.\d+ and no normalization is given, so they are treated as pixels",
    ),
    "digits in 0..16": (lambda: LabeledImages(pixels() * 16, marks()), r"images range from 0\.\d+ to 1\d"),
    "pixels said to be normalised": (
        lambda: LabeledImages(pixels(), marks(), normalization=HALF),
        r"images are in \[0, 1\], although black is -2 .*from_pixels",
    ),
    "0..255 said to be normalised": (
        lambda: LabeledImages(pixels(c=3) * 255, marks(), normalization=COLOUR),
        r"images range from .* but pixels in \[0, 1\] from .*divide 0..255 by 255",
    ),
    **{
        f"{w} channels last, normalised": (
            lambda w=w: LabeledImages(HALF.encode(pixels(c=9, h=8, w=w)), marks(), normalization=HALF),
            rf"\[6, 9, 8, {w}\] looks like \[N, H, W, C\].*permute\(0, 3, 1, 2\)",
        )
        for w in (1, 3, 4)
    },
    "labels from 1": (
        lambda: LabeledImages(pixels(), marks() + 1),
        "labels start at 1, so class 0 is empty.*labels - 1",
    ),
    "labels from 1 of pixels": (lambda: LabeledImages.from_pixels(pixels(), marks() + 1), "labels start at 1"),
    "ipc above a class": (
        lambda: random_subset(pixels(13), torch.arange(13) % 6, ipc=3),
        r"ipc=3 is more than 5 of 6 classes have: 1 \(2\), 2 \(2\), 3 \(2\), 4 \(2\), 5 \(2\); their",
    ),
    "ipc above a class, herding": (
        lambda: herding(pixels(6), torch.arange(6), ipc=2),
        r"ipc=2 is more than 6 of 6 classes have: 0 \(1\), 1 \(1\), 2 \(1\), 3 \(1\), 4 \(1\), \.\.\.; their",
    ),
    "ipc above a class, DM": (
        lambda: distribution_matching(pixels(), marks(), networks=RandomNetworks(net), ipc=3, steps=0),
        "ipc=3 is more than 3 of 3",
    ),
    "clusters above N": (
        lambda: select(torch.rand(9, 4), torch.rand(9, 3), keep=3),
        "clusters=1000 for 9 embeddings: each is its own centroid",
    ),
}


def net() -> ConvNet:
    return ConvNet((1, 8, 8), 3, width=4, depth=1)


@pytest.mark.parametrize(("call", "words"), ODD.values(), ids=ODD)
def test_implausible_input_is_warned_of_at_the_callers_line(call: Callable[[], Any], words: str) -> None:
    with pytest.warns(UserWarning, match=words) as seen:
        call()
    assert {one.filename for one in seen} == {__file__}
    with without_warnings():
        call()


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "0..255": (
        lambda: as_set(pixels() * 255, marks()),
        ValueError,
        r"images must be pixels in \[0, 1\] where no normalization is given, got .*images / 255",
    ),
    "no normalization": (
        lambda: LabeledImages(pixels(), marks(), normalization=(0.5, 0.25)),  # type: ignore[arg-type]
        TypeError,
        r"normalization must be a Normalization\(mean, std\), got tuple",
    ),
    "replace of a typo": (
        lambda: LabeledImages(pixels(), marks()).replace(image=pixels(), size=8),
        TypeError,
        "replace takes images, labels.*got image, size$",
    ),
    "pixels with channels last": (
        lambda: LabeledImages.from_pixels(pixels(c=28, h=28, w=3), marks()),
        ValueError,
        r"\[6, 28, 28, 3\] looks like \[N, H, W, C\]",
    ),
    "an embedding without a name": (
        lambda: plot.tsne(torch.rand(9, 4), torch.zeros(9)),  # type: ignore[arg-type]
        TypeError,
        r'embeddings must be a mapping, name -> rows \[N, d\], got Tensor; for a single one use {"all": embeddings}',
    ),
    "mmd of a tensor": (lambda: plot.mmd_table(torch.rand(9, 4)), TypeError, "before must be a mapping"),  # type: ignore[arg-type]
    "a set without a name": (
        lambda: plot.pixel_histogram(LabeledImages(pixels(), marks())),  # type: ignore[arg-type]
        TypeError,
        "sets must be a mapping, name -> LabeledImages",
    ),
    "an empty test": (
        lambda: evaluate((pixels(), marks()), LabeledImages(pixels(), marks())[:0], net),
        ValueError,
        "test must hold at least one image",
    ),
    "rows to test on": (
        lambda: evaluate((pixels(), marks()), (pixels(), torch.eye(3)[marks()]), net),
        ValueError,
        r"test must have class indices as labels, got rows of shape \[6, 3\]$",
    ),
}


@pytest.mark.parametrize(("low", "high", "outcome"), [
    (0.0, 1.001, None), (-0.001, 1.0, None), (0.0, 1.002, "range from"), (-0.002, 1.0, "range from"),
    (0.0, 16.0, "range from"), (0.0, 16.01, "given, got"), (-0.01, 16.01, "range from"),
])  # fmt: skip
def test_range_without_a_normalization(low: float, high: float, outcome: str | None) -> None:
    images = torch.full((2, 1, 4, 4), 0.5, dtype=torch.float64)
    images[0, 0, 0, 0], images[1, 0, 1, 2] = low, high
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if outcome is None:
            as_set(images, torch.tensor([0, 1]))
        else:
            words = f"{outcome} {low:.4g} to {high:.4g}{' and no' if outcome == 'range from' else '; divide'}"
            refused(lambda: as_set(images, torch.tensor([0, 1])), (ValueError, UserWarning), words)
            identity = ZCA(torch.zeros(16), torch.eye(16), torch.eye(16))
            LabeledImages(images * 99, [0, 1], normalization=Normalization((0.5,), (0.25,), identity))  # in no range


@pytest.mark.parametrize(("mean", "std", "low", "high", "words"), [
    ((0.19,), (1.0,), 0.0, 1.0, None), ((0.21,), (1.0,), 0.0, 1.0009, "although black"),
    ((0.21,), (1.0,), 0.0, 1.002, None), ((0.21,), (1.0,), -0.001, 1.0, None), ((0.1, 0.9), (1.0, 1.0), 0.0, 1.0, None),
    ((0.5,), (0.25,), -38.0, 38.0, None), ((0.5,), (0.25,), -38.1, 0.0, "images range"),
    ((0.5,), (0.25,), 0.0, 38.1, "images range"), ((0.5, 0.1), (0.25, 0.5), -38.0, 38.0, None),
])  # fmt: skip
def test_range_within_a_normalization(mean: Any, std: Any, low: float, high: float, words: str | None) -> None:
    """Nine ranges beyond black and white, of all channels, are no noise."""
    images = torch.full((2, len(mean), 4, 4), max(low, 0.0))
    images[0, 0, 0, 0], images[1, -1, 1, 2] = low, high
    call = lambda: LabeledImages(images, [0, 1], normalization=Normalization(mean, std))  # noqa: E731
    if words is None:
        call()
    else:
        refused(call, UserWarning, words)
        if words == "images range":
            pixels = r"but pixels in \[0, 1\] from -2 to 2 in the normalization given"
            refused(call, UserWarning, f"^images range from {low:.4g} to {high:.4g}, {pixels}")


@pytest.mark.parametrize(("row", "wrong"), [
    ([0.3, 0.7], True), ([0.3, 0.7005], True), ([0.3, 0.702], False), ([-0.1, 1.1], False), ([1.0], False),
    ([0.3, 0.1], False),
])  # fmt: skip
def test_rows_of_probabilities_are_no_logits(row: list[float], wrong: bool) -> None:
    logits = torch.tensor([row, [1.0] + [0.0] * (len(row) - 1)])
    if wrong:
        refused(lambda: check_logits(logits, "it", refuse=True), ValueError, "it must return logits")
        refused(lambda: check_logits(logits, "it", refuse=False), UserWarning, "it must return logits")
    else:
        check_logits(logits, "it", refuse=True)


@pytest.mark.parametrize(("before", "after", "wrong"), [(16.0, 16.5, True), (16.5, 17.0, False), (1.0, 16.0, False)])
def test_perturbed_pixels_in_0_to_255(before: float, after: float, wrong: bool) -> None:
    """Pixels that were as large before are the caller's own units."""
    pixels, changed = torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2, 2)
    pixels[1, 0, 0, 0], changed[0, 0, 1, 1] = before, after
    if wrong:
        refused(lambda: check_perturbed(changed, pixels, "against"), ValueError, r"pixels in \[0, 1\], got up to 16.5")
    else:
        assert check_perturbed(changed, pixels, "against") is changed


@pytest.mark.parametrize(("call", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    refused(call, error, words)


class Flip(torch.nn.Module):
    """Module like torchvision's transforms."""

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        return img.flip(3)


AUGMENTS = {
    "True": (True, "got True"),
    "a name": ("dsa", r"distillkit.augment.DSA\(\).*got 'dsa'"),
    "a class": (DSA, r"got the class DSA, pass DSA\(\.\.\.\)"),
    "a transform": (Flip(), r"Flip\(img.*has other arguments\. Wrap it in a function that draws from the generator"),
    "no siamese": (lambda images, generator: images, r"<lambda>\(images, generator\) has other arguments"),
    "a lambda": (lambda images: images, r"<lambda>\(images\) has other arguments"),
}


@pytest.mark.parametrize(("augment", "words"), AUGMENTS.values(), ids=AUGMENTS)
def test_invalid_augmentation_is_refused_before_any_work(augment: Any, words: str) -> None:
    data = (pixels(), marks())
    for call in (
        lambda: distribution_matching(data, networks=RandomNetworks(net), ipc=1, augment=augment),
        lambda: gradient_matching(data, networks=RandomNetworks(net), ipc=1, augment=augment),
        lambda: Protocol(augment=augment),
    ):
        refused(call, TypeError, f"augment must be None or an augmentation.*{words}")


def test_augmentation_in_federated_training_needs_no_siamese_argument() -> None:
    require_augmentation(lambda images, generator: images, siamese=False)
    with pytest.raises(TypeError, match=r"called as augment\(images, generator\)"):
        require_augmentation(lambda images: images, siamese=False)
