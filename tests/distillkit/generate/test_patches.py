from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kornia.enhance import adjust_contrast_with_mean_subtraction
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as pil

from distillkit._utils.provenance import provenance
from distillkit.generate.patches import CropParameters, Patches
from distillkit.normalization import Normalization
from tests.refused import refused


def picture(height: int = 90, width: int = 120, channels: int = 3) -> Tensor:
    """Return an 8-bit picture of smooth colours with an edge."""
    y, x = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 4, width), indexing="ij")
    waves = torch.stack([0.5 + 0.4 * torch.sin((c + 1) * y + x * (1.3 + c)) for c in range(channels)])
    waves[:, height // 3 :, width // 2 :] *= 0.6
    return (waves * 255).round().to(torch.uint8)


PATCHES = Patches(picture(), seed=3)
FEW = PATCHES.batch(range(48))

RENDER = """
import hashlib, sys, torch
sys.path[:0] = {path!r}
from distillkit.generate.patches import Patches
torch.set_num_threads({threads})
torch.manual_seed({threads})
image = torch.tensor({image!r}, dtype=torch.uint8)
crops = Patches(image, seed=3).batch({indices!r})
print(hashlib.sha256(crops.numpy().tobytes()).hexdigest())
"""


def sha(crops: Tensor) -> str:
    return hashlib.sha256(crops.numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_two_processes_render_the_same_bits() -> None:
    image, indices = picture(40, 50), [49_999, 0, 17, 3, 4, 5, 6, 7, 8]
    sources = [
        RENDER.format(path=sys.path, threads=threads, image=image.tolist(), indices=indices) for threads in (1, 2)
    ]
    processes = [
        subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, encoding="utf-8") for source in sources
    ]
    printed = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert printed == [sha(Patches(image, seed=3).batch(indices))] * 2


@given(st.lists(st.integers(0, 47), min_size=1, max_size=9))
def test_a_crop_does_not_depend_on_its_batch(indices: list[int]) -> None:
    assert torch.equal(PATCHES.batch(indices), FEW[indices])
    assert torch.equal(PATCHES[indices[0]], FEW[indices[0]])


def test_a_crop_does_not_depend_on_the_threads() -> None:
    torch.set_num_threads(2)
    try:
        assert torch.equal(PATCHES.batch(torch.arange(48)), FEW)
    finally:
        torch.set_num_threads(1)


def test_crops_are_8_bit_pixels_and_differ(global_rng_untouched: None) -> None:
    crops = PATCHES.batch(range(20))
    assert crops.shape == (20, 3, 32, 32)
    assert crops.dtype == torch.float32
    assert torch.equal((crops * 255).round() / 255, crops)
    assert len({sha(c) for c in crops}) == 20
    assert not torch.equal(Patches(picture(), seed=4).batch([0, 1]), crops[:2])


def test_a_larger_count_only_adds_crops() -> None:
    assert torch.equal(Patches(picture(), seed=3, count=5).batch(range(5)), FEW[:5])
    refused(lambda: Patches(picture(), count=5)[5], IndexError, r"index must be in \[0, 5\), got 5")
    refused(lambda: Patches(picture().permute(1, 2, 0)), ValueError, r"image must be \[C, H, W\]")


def test_parameters_keep_the_published_ranges() -> None:
    side = 45
    patches = Patches(picture(90, 160))
    parameters = [patches.crop_parameters(i) for i in range(600)]
    for r in parameters:
        assert 0 <= r.top <= r.top + r.height <= 90
        assert 0 <= r.left <= r.left + r.width <= 160
        assert 1 <= min(r.height, r.width) <= max(r.height, r.width) <= side
        assert (r.width - 0.5) / (r.height + 0.5) <= 4 / 3
        assert (r.width + 0.5) / (r.height - 0.5) >= 3 / 4
        assert abs(r.rotation) <= 30 >= abs(r.shear)
        assert len(r.jitter) in (0, 4)
        assert all(abs(amount) <= (0.1 if name == "hue" else 0.4) for name, amount in r.jitter)
        assert not r.flip
    jittered = [r for r in parameters if r.jitter]
    share = torch.tensor([r.height * r.width / side**2 for r in parameters])
    logs = torch.tensor([math.log(r.width / r.height) for r in parameters if min(r.width, r.height) > 10])
    assert 0.45 < len(jittered) / 600 < 0.55
    assert 0.4 < float(share.mean()) < 0.52, "areas are uniform, less those whose crop does not fit"
    assert float(share.min()) < 0.02
    assert abs(float(logs.mean())) < 0.02, "log-uniform aspects have mean zero"
    angles = torch.tensor([r.rotation for r in parameters])
    assert abs(float(angles.mean())) < 2.5
    assert abs(float(angles.std()) - 60 / math.sqrt(12)) < 1
    assert max(r.left for r in parameters) > 110 > 10 > min(r.left for r in parameters)
    assert {r.jitter[0][0] for r in jittered} == {"brightness", "contrast", "saturation", "hue"}


def test_parameters_are_the_same_in_all_versions() -> None:
    """Parties that compare digests rely on this. The options differ from the defaults, and one strength is zero."""
    options: dict[str, Any] = {"area": (0.2, 0.9), "aspect": (0.5, 1.8), "jitter": (0.1, 0.0, 0.3, 0.4)}
    options |= {"rotation": 20.0, "shear": 10.0, "flip": 0.4, "jitter_probability": 0.7, "precrop": 0.6}
    patches = Patches(picture(90, 160), 7, **options)
    jitter = [
        {"saturation": 0.066253161264756, "brightness": -0.007154258120616897, "hue": 0.2723706262165854},
        {"saturation": 0.277507061659835, "brightness": -0.07713365625679597, "hue": 0.13615220035636613},
    ]
    expected = [
        (35, 90, 45, 48, -17.56536504531227, -8.726767311061142, True, tuple(jitter[0].items())),
        (23, 73, 38, 19, 3.2251455778276705, -9.8736718573523, False, tuple(jitter[1].items())),
    ]
    assert [patches.crop_parameters(i) for i in (1, 2)] == expected


def by_image_library(image: Tensor, r: CropParameters) -> Tensor:
    """Apply the published pipeline to an 8-bit picture with Pillow."""
    rows = Image.fromarray(image.permute(1, 2, 0).numpy())
    crop = pil.resized_crop(rows, r.top, r.left, r.height, r.width, [45, 45], InterpolationMode.BICUBIC)
    crop = pil.affine(crop, r.rotation, [0, 0], 1.0, [r.shear, 0.0], InterpolationMode.BILINEAR)
    crop = pil.center_crop(crop, [32, 32])
    for name, amount in r.jitter:
        crop = getattr(pil, f"adjust_{name}")(crop, amount if name == "hue" else 1 + amount)
    return pil.to_tensor(crop)


@pytest.mark.parametrize(("jittered", "most", "mean"), [(0.0, 0.012, 0.003), (1.0, 0.08, 0.015)])
def test_crops_agree_with_the_published_pipeline_in_an_image_library(jittered: float, most: float, mean: float) -> None:
    """Equal up to 8-bit rounding, which an image library applies in each step."""
    image = picture(200, 180)
    patches = Patches(image, seed=1, jitter_probability=jittered)
    for i in range(30):
        difference = (patches[i] - by_image_library(image, patches.crop_parameters(i))).abs()[:, 3:-3, 3:-3]
        assert float(difference.max()) < most
        assert float(difference.mean()) < mean


@pytest.mark.parametrize(("size", "large"), [(32, 45), (28, 39), (4, 5)])
def test_without_motion_or_jitter_a_crop_is_the_centre_of_the_resized_rectangle(size: int, large: int) -> None:
    """The resized rectangle has int(sqrt(2) size) pixels, and a crop begins as an image library's does."""
    patches = Patches(picture(), 5, size=size, rotation=0.0, shear=0.0, jitter_probability=0.0)
    r = patches.crop_parameters(2)
    source = patches.image[None, :, r.top : r.top + r.height, r.left : r.left + r.width]
    resized = torch.nn.functional.interpolate(source, (large, large), mode="bicubic", antialias=True)[0]
    assert (patches[2] - pil.center_crop(resized, [size, size])).abs().max() < 1.01 / 255
    noise, strengths = torch.rand(3, 60, 60, generator=torch.Generator()), (0.0, 0.4, 0.0, 0.0)
    patches = Patches(noise, 5, size=size, rotation=0.0, shear=0.0, jitter=strengths, jitter_probability=1.0)
    r = patches.crop_parameters(2)
    source = patches.image[None, :, r.top : r.top + r.height, r.left : r.left + r.width]
    resized = torch.nn.functional.interpolate(source, (large, large), mode="bicubic", antialias=True)[0]
    cut = pil.center_crop(resized.clamp(0, 1), [size, size])
    wanted = adjust_contrast_with_mean_subtraction(cut, 1 + r.jitter[0][1])
    assert (patches[2] - wanted).abs().max() < 1.01 / 255


def test_a_flip_mirrors() -> None:
    always = Patches(picture(), 3, flip=1.0, jitter_probability=0.0)
    never = Patches(picture(), 3, flip=0.0, jitter_probability=0.0)
    assert torch.equal(always[0], never[0].flip(-1))


def test_operations_of_strength_zero_are_left_out() -> None:
    one = Patches(picture(), 3, jitter=(0.0, 0.0, 0.0, 0.5), jitter_probability=1.0)
    assert [name for name, _ in one.crop_parameters(0).jitter] == ["hue"]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_jpeg_round_trip_changes_little(channels: int) -> None:
    plain = Patches(picture(channels=channels), 3).batch(range(8))
    good, bad = (Patches(picture(channels=channels), 3, jpeg_quality=q).batch(range(8)) for q in (75, 5))
    assert good.shape == plain.shape
    assert 0 < float((good - plain).abs().mean()) < 0.02 < float((bad - plain).abs().mean())


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("size", [8, 28])
def test_any_channel_count_and_size(channels: int, size: int) -> None:
    patches = Patches(picture(channels=channels), size=size, jitter_probability=1.0)
    assert patches.batch(range(3)).shape == (3, channels, size, size)


def test_a_small_image_is_enough() -> None:
    patches = Patches(picture(32, 33), area=(1e-6, 1e-5), count=3)
    assert (patches.crop_parameters(0).height, patches.crop_parameters(0).width) == (16, 16)  # the whole square
    assert patches.batch([]).shape == (0, 3, 32, 32)


def test_the_digest_is_of_the_image_and_the_options() -> None:
    image = picture()
    assert Patches(image).digest == Patches(image.float() / 255, count=7).digest
    blue = torch.cat([image[:2], image[2:].flip(-1)])
    options = {
        "size": 16, "precrop": 0.4, "area": (0.1, 1.0), "aspect": (0.7, 1.3), "rotation": 35.0, "shear": 20.0,
        "flip": 0.5, "jitter": (0.4, 0.4, 0.3, 0.1), "jitter_probability": 0.4, "jpeg_quality": 75,
    }  # fmt: skip
    others = [Patches(image, 1), Patches(blue), *(Patches(image, **{name: v}) for name, v in options.items())]  # type: ignore[arg-type]
    others += [Patches(image.flip(-1))]
    assert len({Patches(image).digest, *(p.digest for p in others)}) == 14


def test_chunks_cover_everything_in_order() -> None:
    patches = Patches(picture(), 3, count=48)
    assert [len(c) for c in patches.chunks(20)] == [20, 20, 8]
    assert torch.equal(torch.cat(list(patches.chunks(20))), FEW)
    assert torch.equal(torch.cat(list(patches.chunks(2, torch.tensor([4, 1, 9])))), FEW[[4, 1, 9]])
    assert len(list(patches)) == len(patches) == 48


def test_a_set_records_the_origin_of_its_crops() -> None:
    half = Normalization((0.5,) * 3, (0.25,) * 3)
    crops = PATCHES.set([5, 2], torch.tensor([1, 0]), num_classes=4, normalization=half)
    assert torch.allclose(crops.pixels(), FEW[[5, 2]], atol=1e-6)
    assert crops.normalization == half
    assert crops.columns["index"].tolist() == [5, 2]
    assert crops.num_classes == 4
    facts = {"method": "patches", "derived": "patches", "seed": 3, "digest": PATCHES.digest}
    assert crops.info == {**facts, **provenance()}
    assert crops.labels.tolist() == [1, 0]
    assert "50000 crops of 32x32 from 3x90x120; seed=3" in repr(PATCHES)


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"image must be pixels in \[0, 1\], got \[2, 2\]", {"image": torch.full((3, 40, 40), 2.0)}),
        (r"image must be pixels in \[0, 1\], got \[-0.5, -0.5\]", {"image": torch.full((3, 40, 40), -0.5)}),
        ("precrop must be at most 1, got 1.1", {"precrop": 1.1}),
        (r"rotation must be in \[0, 180\], got 181", {"rotation": 181.0}),
        (r"flip must be in \[0, 1\], got 1.1", {"flip": 1.1}),
        (r"jitter_probability must be in \[0, 1\], got 1.1", {"jitter_probability": 1.1}),
        ("image must be at least size=32 pixels high and wide, got 31x50", {"image": picture(31, 50)}),
        (r"area must be \(low, high\), got \(0.5, 0.1\)", {"area": (0.5, 0.1)}),
        ("area must be at most 1, got 1.1", {"area": (0.5, 1.1)}),
        ("aspect must be greater than 0, got 0", {"aspect": (0.0, 1.1)}),
        ("shear must be less than 90, got 90", {"shear": 90.0}),
        (r"jitter must be .* the hue's in \[0, 0.5\], got \(0.1, 0.1, 0.1, 0.6\)", {"jitter": (0.1, 0.1, 0.1, 0.6)}),
        ("jitter must be 4 strengths: brightness, contrast, saturation, hue, got 1", {"jitter": (0.1,)}),
        ("jpeg_quality must be at most 100, got 101", {"jpeg_quality": 101}),
        ("jpeg_quality needs .* 1 or 3 channels, got 5", {"jpeg_quality": 75, "image": picture(channels=5)}),
    ],
)
def test_invalid_arguments_are_named(match: str, options: dict[str, Any]) -> None:
    refused(lambda: Patches(**{"image": picture(), **options}), ValueError, f"^{match}$")


@pytest.mark.parametrize("indices", [torch.tensor([0.0]), torch.tensor([[0]]), [0.5], [True]])
def test_bad_indices_are_refused(indices: Any) -> None:
    refused(lambda: PATCHES.batch(indices), TypeError, r"ind(ex|ices) must be")
    refused(lambda: PATCHES.batch([-1]), IndexError, "got -1")
    for index in (-1, len(PATCHES)):
        refused(lambda: PATCHES.set([index], torch.tensor([0])), IndexError, f"got {index}")  # noqa: B023
    refused(lambda: PATCHES[0.5], TypeError, "index must be an int, got float")
