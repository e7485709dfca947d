from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from distillkit import LabeledImages, Normalization
from distillkit.augment import DIGITS, DSA, NATURAL, CropFlip, ResizedCrop, ShufflePatches, apply_augmentation
from distillkit.augment.crop_flip import adapt_normalization
from distillkit.condense import InnerTraining, distribution_matching, gradient_matching
from distillkit.networks import ConvNet, RandomNetworks
from distillkit.normalization import IDENTITY, ZCA
from distillkit.privacy import EmbeddingNetworks, Passes, condense_private
from distillkit.rng import derive
from distillkit.training import Protocol, train
from tests.fl.emulated_device import DEVICE, second_device
from tests.refused import refused

FAMILIES = NATURAL.split("_")


def pictures(n: int = 3, c: int = 3, h: int = 8, w: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(n, c, h, w, generator=derive(seed, "pictures"), dtype=torch.float64)


def uniform(g: torch.Generator, n: int, low: float, high: float) -> list[float]:
    return (torch.rand(n, generator=g, dtype=torch.float64) * (high - low) + low).tolist()


def integers(g: torch.Generator, n: int, high: int) -> list[int]:
    return torch.randint(high, (n,), generator=g).tolist()


def sampled(x: Tensor, at: list[list[tuple[float, float]]]) -> Tensor:
    """Sample one image [C, H, W] bilinearly at pixel positions (row, column), zeros outside."""
    _, h, w = x.shape
    out = torch.zeros_like(x)
    for i in range(h):
        for j in range(w):
            r, q = at[i][j]
            for rr in (math.floor(r), math.floor(r) + 1):
                for qq in (math.floor(q), math.floor(q) + 1):
                    if 0 <= rr < h and 0 <= qq < w:
                        out[:, i, j] += x[:, rr, qq] * (1 - abs(r - rr)) * (1 - abs(q - qq))
    return out


def reference(
    family: str, x: Tensor, g: torch.Generator, siamese: bool, strengths: tuple[float, float, float] = (1.0, 2.0, 0.5)
) -> Tensor:
    """Apply the published transforms, one image and one pixel at a time. `strengths` are those of the family color."""
    brightness, saturation, contrast = strengths
    n, _, h, w = x.shape
    m = 1 if siamese else n
    out = x.clone()
    if family == "color":
        offset, factor = uniform(g, m, -brightness / 2, brightness / 2), uniform(g, m, 0, saturation)
        stretch = uniform(g, m, contrast, contrast + 1)
    elif family == "crop":
        down, right = integers(g, m, 2 * round(h / 8) + 1), integers(g, m, 2 * round(w / 8) + 1)
    elif family == "cutout":
        a, b = (h + 1) // 2, (w + 1) // 2
        rows, columns = integers(g, m, h + 1 - a % 2), integers(g, m, w + 1 - b % 2)
    elif family == "flip":
        lot = uniform(g, m, 0, 1)
    elif family == "scale":
        sx, sy = uniform(g, m, 1 / 1.2, 1.2), uniform(g, m, 1 / 1.2, 1.2)
    else:
        angle = [math.radians(a) for a in uniform(g, m, -15, 15)]
    for k in range(n):
        p = 0 if siamese else k
        if family == "color":
            bright = x[k] + offset[p]
            vivid = (bright - bright.mean(0)) * factor[p] + bright.mean(0)
            out[k] = (vivid - vivid.mean()) * stretch[p] + vivid.mean()
        for i in range(h):
            for j in range(w):
                if family == "crop":
                    r, q = i + down[p] - round(h / 8), j + right[p] - round(w / 8)
                    out[k, :, i, j] = x[k, :, r, q] if 0 <= r < h and 0 <= q < w else 0
                elif family == "cutout":
                    top, left = rows[p] - a // 2, columns[p] - b // 2
                    if top <= i < top + a and left <= j < left + b:
                        out[k, :, i, j] = 0
                elif family == "flip" and lot[p] < 0.5:
                    out[k, :, i, j] = x[k, :, i, w - 1 - j]
        if family in ("scale", "rotate"):
            at = []
            for i in range(h):
                at.append([])
                for j in range(w):
                    v, u = i + 0.5 - h / 2, j + 0.5 - w / 2  # from the centre, in pixels
                    if family == "scale":
                        v, u = v * sy[p], u * sx[p]
                    else:
                        cos, sin = math.cos(angle[p]), math.sin(angle[p])
                        v, u = sin * u + cos * v, cos * u - sin * v
                    at[-1].append((v + h / 2 - 0.5, u + w / 2 - 0.5))
            out[k] = sampled(x[k], at)
    return out


@pytest.mark.parametrize("siamese", [True, False])
@pytest.mark.parametrize("shape", [(3, 3, 8, 8), (2, 1, 8, 12), (2, 5, 12, 8), (3, 1, 5, 9)])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_the_slow_reference(
    family: str, shape: tuple[int, int, int, int], siamese: bool, global_rng_untouched: None
) -> None:
    x = pictures(*shape)
    for seed in range(3):
        got = DSA(family, mode="M")(x, derive(seed, family), siamese=siamese)
        want = reference(family, x, derive(seed, family), siamese)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_strengths_are_those_given() -> None:
    x = pictures(seed=8)
    still = DSA("crop_cutout_flip_scale_rotate", mode="M", crop=0, cutout=0, flip=0, scale=1, rotate=0)
    torch.testing.assert_close(still(x, 0), x)
    assert torch.equal(DSA("flip", flip=1)(x, 0), x.flip(3))
    got = DSA("color", brightness=3.0, saturation=0.7, contrast=0.1)(x, derive(1))
    derived = derive(1)
    torch.randint(1, (), generator=derived)  # the choice of the family
    torch.testing.assert_close(got, reference("color", x, derived, False, (3.0, 0.7, 0.1)))


@pytest.mark.parametrize("family", FAMILIES)
def test_siamese_draws_on_a_device_are_those_of_the_cpu(family: str) -> None:
    x = pictures(3, 3, 8, 12, seed=9)
    with second_device():
        for seed in range(4):
            there = DSA(family, mode="M")(x.to(DEVICE), seed, siamese=True)
            torch.testing.assert_close(there.cpu(), DSA(family, mode="M")(x, seed, siamese=True))


def test_mode_s_applies_one_family_and_reaches_all() -> None:
    x, seen = pictures(2, seed=3), set()
    for seed in range(60):
        g = derive(seed, "mode s")
        got = DSA(mode="S")(x, g.clone_state(), siamese=True)
        index = int(torch.randint(6, (), generator=g))
        seen.add(FAMILIES[index])
        torch.testing.assert_close(got, DSA(FAMILIES[index], mode="M")(x, g, siamese=True))
    assert seen == set(FAMILIES)


def test_mode_m_composes_in_the_order_of_the_strategy() -> None:
    assert DSA(DIGITS).families == tuple(family for family in FAMILIES if family != "flip")
    x, g = pictures(2, seed=4), derive(5)
    got = DSA("rotate_color_crop", mode="M")(x, derive(5))
    want = x
    for family in ("rotate", "color", "crop"):
        want = DSA(family, mode="M")(want, g)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("siamese", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_and_gradients_of_a_parameter_gradient(family: str, siamese: bool) -> None:
    """The second is what gradient matching takes: d/dx of d loss(w, augment(x)) / dw."""
    x = pictures(2, 2, 5, 4).requires_grad_()
    w = torch.linspace(-1, 1, 2 * 5 * 4, dtype=torch.float64).view(2, 5, 4).requires_grad_()

    def augmented(images: Tensor) -> Tensor:
        return DSA(family, flip=0.7)(images, derive(9), siamese=siamese)

    def parameter_gradient(images: Tensor) -> Tensor:
        loss = torch.tanh((w * augmented(images)).sum((1, 2, 3))).sum()
        return torch.autograd.grad(loss, w, create_graph=True)[0]

    assert gradcheck(lambda images: augmented(images).square(), (x,), fast_mode=True)
    assert gradcheck(parameter_gradient, (x,), fast_mode=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strategy": ""}, ValueError, "families"),
        ({"strategy": "flip_zoom"}, ValueError, "families"),
        ({"strategy": "flip_flip"}, ValueError, "each family once"),
        ({"scale": 0.9}, ValueError, "scale must be"),
        ({"flip": 1.5}, ValueError, "flip must be in"),
    ],
)
def test_invalid_options_are_refused(arguments: dict, error: type[Exception], message: str) -> None:
    refused(lambda: DSA(**arguments), error, message)


def test_invalid_images_are_refused() -> None:
    refused(lambda: DSA()(torch.zeros(3, 8, 8), 0), ValueError, "4 dimensions")
    refused(lambda: DSA()(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 0), TypeError, "floating point")
    refused(lambda: DSA()(pictures(), "seed"), TypeError, "generator")


@pytest.mark.parametrize(("wrong", "came"), [
    (lambda x: x.double(), r"torch.float64 \[3, 3, 8, 8\]"), (lambda x: x[..., :4], r"torch.float32 \[3, 3, 8, 4\]"),
    (lambda x: None, "NoneType"),
])  # fmt: skip
def test_augmentation_must_keep_shape_and_dtype(wrong: Callable[[Tensor], object], came: str) -> None:
    augment = lambda images, generator, siamese: wrong(images)  # noqa: E731
    call = partial(apply_augmentation, augment, pictures().float(), derive(0), siamese=True)
    refused(call, ValueError, rf"augment must return torch.float32 \[3, 3, 8, 8\], like its input, got {came}$")


CIFAR = Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def released_crop_flip(
    x: Tensor, space: Normalization, g: torch.Generator, siamese: bool, pad: int, flip: float, cutout: int
) -> Tensor:
    """RandomCrop(padding) and flip of the pixels, Normalize, then Cutout as in VHL's data_preprocessing/utils/utils.py
    (lines 6-25): centre (y, x), rows clip(y - L // 2, 0, h) to clip(y + L // 2, 0, h), times 0. One image at a time."""
    n, c, h, w = x.shape
    m = 1 if siamese else n
    down, right = integers(g, m, 2 * pad + 1), integers(g, m, 2 * pad + 1)
    lot = uniform(g, m, 0, 1)
    centers = (integers(g, m, h), integers(g, m, w)) if cutout else ()
    out = []
    for k in range(n):
        p = 0 if siamese else k
        board = torch.zeros(c, h + 2 * pad, w + 2 * pad, dtype=x.dtype)
        board[:, pad : pad + h, pad : pad + w] = space.decode(x[k : k + 1])[0]
        pixels = board[:, down[p] : down[p] + h, right[p] : right[p] + w]
        image = space.encode((pixels.flip(2) if lot[p] < flip else pixels)[None])[0]
        if centers:
            y, z = centers[0][p], centers[1][p]
            top, bottom = (min(max(i, 0), h) for i in (y - cutout // 2, y + cutout // 2))
            left, end = (min(max(i, 0), w) for i in (z - cutout // 2, z + cutout // 2))
            image[:, top:bottom, left:end] *= 0
        out.append(image)
    return torch.stack(out)


@pytest.mark.parametrize("siamese", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 8, 8), (4, 3, 6, 11)])
@pytest.mark.parametrize("space", [CIFAR, IDENTITY], ids=str)
@pytest.mark.parametrize("options", [{}, {"pad": 2, "flip": 0.8, "cutout": 4}, {"pad": 0, "cutout": 6}])
def test_crop_flip_equals_the_pipeline_on_pixels(
    options: dict, space: Normalization, shape: tuple[int, int, int, int], siamese: bool, global_rng_untouched: None
) -> None:
    x = pictures(*shape)
    for seed in range(3):
        got = CropFlip(space, **options)(x, derive(seed), siamese=siamese)
        want = released_crop_flip(x, space, derive(seed), siamese, **{"pad": 4, "flip": 0.5, "cutout": 0, **options})
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_crop_flip_pads_whitened_images_as_pixels() -> None:
    pixels = torch.rand(60, 3, 4, 4, generator=derive(1), dtype=torch.float64)
    plain = Normalization((0.5, 0.4, 0.6), (0.2, 0.3, 0.25))
    white = Normalization(plain.mean, plain.std, ZCA.fit(plain.encode(pixels)))
    for cutout in (0, 2):
        got = CropFlip(white, pad=2, cutout=cutout)(white.encode(pixels), derive(5))
        want = released_crop_flip(white.encode(pixels), white, derive(5), False, 2, 0.5, cutout)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


def test_crop_flip_works_as_any_augmentation() -> None:
    """In a space other than its own it is refused, because it would pad with grey."""
    space = Normalization((0.5,), (0.25,))
    data = LabeledImages(
        torch.randn(12, 1, 8, 8, generator=derive(2)), torch.arange(12) % 2, num_classes=2, normalization=space
    )
    networks = RandomNetworks(lambda: ConvNet((1, 8, 8), 2, width=4, depth=1))

    def uses(augment: CropFlip) -> list:
        few = {"networks": networks, "ipc": 1, "augment": augment}
        return [
            lambda: distribution_matching(data, steps=1, **few),
            lambda: gradient_matching(data, iterations=1, inner=InnerTraining(loops=(1, 1)), **few),
            lambda: condense_private(
                data, epsilon=5.0, delta=1e-3, networks=EmbeddingNetworks(networks, augment=augment), num_networks=2,
                passes=Passes(first_num_networks=2, first_steps=1), steps=1, ipc=1,
            ),
            lambda: train(ConvNet((1, 8, 8), 2, width=4, depth=1), data, Protocol(epochs=1, augment=augment)),
        ]  # fmt: skip

    for use in uses(CropFlip(space, pad=2)):
        use()
    for use in uses(CropFlip(IDENTITY, pad=2)):
        refused(use, ValueError, "augment pads with black for pixels in")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"flip": 1.5}, ValueError, "flip"),
        ({"cutout": 1}, ValueError, "cutout must be even, got 1"),
        ({"normalization": 3}, TypeError, "^normalization must be .* got int"),
    ],
)
def test_bad_options_of_crop_flip_are_refused(arguments: dict, error: type[Exception], message: str) -> None:
    refused(lambda: CropFlip(**{"normalization": CIFAR, **arguments}), error, message)


def test_images_unsuitable_for_crop_flip_are_refused() -> None:
    for h, w in ((8, 8), (8, 10), (10, 8)):
        CropFlip(CIFAR, pad=7, cutout=8)(pictures(2, 3, h, w), 0)
        for options in ({"pad": 8}, {"cutout": 10}):
            with pytest.raises(ValueError, match=f"too large for images of {h}x{w} pixels"):
                CropFlip(CIFAR, **options)(pictures(2, 3, h, w), 0)
    refused(lambda: CropFlip(CIFAR)(pictures(2, 1), 0), ValueError, "1 channels")
    refused(lambda: CropFlip(CIFAR)(torch.zeros(3, 8, 8), 0), ValueError, "4 dimensions")


def test_crop_flip_is_adapted_with_its_options_and_any_other_augmentation_is_kept() -> None:
    augment = DSA()
    assert adapt_normalization(CropFlip(CIFAR, 2, 0.1, 6), IDENTITY) == CropFlip(IDENTITY, 2, 0.1, 6)
    assert adapt_normalization(augment, IDENTITY) is augment
    for wrong, came in ((CropFlip, "the class CropFlip"), (None, "NoneType")):
        words = rf"^augment must be an augmentation, such as CropFlip\(normalization\), got {came}$"
        refused(partial(adapt_normalization, wrong, IDENTITY), TypeError, words)  # type: ignore[arg-type]
    refused(lambda: adapt_normalization(augment, None), TypeError, "^normalization must be")  # type: ignore[arg-type]


@pytest.mark.parametrize("siamese", [True, False])
@pytest.mark.parametrize("shape", [(30, 2, 6, 10), (9, 1, 2, 20)])
def test_resized_crop_equals_the_slow_reference(shape: tuple[int, int, int, int], siamese: bool) -> None:
    """The first of ten crops that fits, or the whole image; pixels at the image's border are repeated outside."""
    x, (n, _, h, w), g, expected = pictures(*shape), shape, derive(0), []
    m = 1 if siamese else n
    lot, draws = uniform(g, m, 0, 1), torch.rand(4, m, 10, generator=g, dtype=torch.float64).permute(1, 2, 0).tolist()
    for k in range(n):
        box = (0.0, 0.0, h, w)
        for area, ratio, down, right in draws[0 if siamese else k]:
            size, aspect = (0.1 + 0.9 * area) * h * w, math.exp(math.log(3 / 4) + math.log(16 / 9) * ratio)
            height, width = round((size / aspect) ** 0.5), round((size * aspect) ** 0.5)
            if 1 <= height <= h and 1 <= width <= w:
                box = (int(down * (h - height + 1)), int(right * (w - width + 1)), height, width)
                break
        top, left, height, width = box
        rows = [min(max((i + 0.5) * height / h + top - 0.5, 0), h - 1) for i in range(h)]
        columns = [min(max((j + 0.5) * width / w + left - 0.5, 0), w - 1) for j in range(w)]
        image = sampled(x[k], [[(row, column) for column in columns] for row in rows])
        expected.append(image.flip(2) if lot[0 if siamese else k] < 0.4 else image)
    found = ResizedCrop(min_scale=0.1, flip=0.4)(x, derive(0), siamese=siamese)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=1e-6)


def test_resized_crop_keeps_the_whole_image_at_scale_one() -> None:
    images = torch.randn(50, 3, 7, 5, generator=derive(0))
    assert torch.equal(ResizedCrop(1.0, flip=0.0)(images, 1), images)
    seen = ResizedCrop(1.0)(images, 1)
    flipped = [torch.equal(a, b.flip(2)) for a, b in zip(seen, images, strict=True)]
    assert [f or torch.equal(a, b) for f, a, b in zip(flipped, seen, images, strict=True)] == [True] * 50
    assert 10 < sum(flipped) < 40
    refused(lambda: ResizedCrop(1.5), ValueError, "min_scale")


@pytest.mark.parametrize(("size", "factor"), [((4, 4), 2), ((5, 7), 2), ((6, 3), 3), ((7, 8), 3)])
def test_shuffled_patches_move_columns_and_rows_of_patches(size: tuple[int, int], factor: int) -> None:
    image = torch.arange(float(size[0] * size[1])).view(1, 1, *size)
    rows, columns = (np.array_split(np.arange(side), factor) for side in size)
    expected = set()
    for down in itertools.permutations(rows):
        for right in itertools.permutations(columns):
            expected.add(tuple(image[0, 0][np.concatenate(down)][:, np.concatenate(right)].flatten().tolist()))
    seen = ShufflePatches(factor)(image.expand(600, 2, -1, -1), derive(0))
    assert torch.equal(seen[:, 0], seen[:, 1])
    found = collections.Counter(tuple(one.flatten().tolist()) for one in seen[:, 0])
    assert set(found) == expected
    assert max(found.values()) < 600 / len(expected) + 4 * (600 / len(expected)) ** 0.5


def test_shuffled_patches_share_an_order_if_siamese_and_pass_images_on() -> None:
    images = torch.randn(5, 1, 4, 4, generator=derive(0))
    assert ShufflePatches(1)(images, 0) is images
    one, two = (ShufflePatches(2)(part, 3, siamese=True) for part in (images, images[:2]))
    assert torch.equal(one[:2], two)
    then = ShufflePatches(1, augment=ResizedCrop(0.5))
    for siamese in (True, False):
        assert torch.equal(then(images, 3, siamese=siamese), ResizedCrop(0.5)(images, 3, siamese=siamese))
    refused(lambda: ShufflePatches(0), ValueError, "factor")
    with pytest.raises(ValueError, match="factor=5 must be at most the shorter side of the images, 4x6 pixels"):
        ShufflePatches(5)(torch.zeros(2, 1, 4, 6), 0)
    refused(lambda: ShufflePatches(2, augment=ResizedCrop), TypeError, "augment must be None or an augmentation")
