from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit import LabeledImages, Normalization
from distillkit.condense import class_statistics, images_from_statistics, initial_images
from distillkit.rng import as_generator, derive
from distillkit.sets import TiledImages, Tiles
from distillkit.sets._class_index import class_rows, random_rows
from tests.refused import refused


def real(*counts: int, size: int = 4) -> LabeledImages:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=derive(1))]
    images = torch.randn(len(labels), 2, size, size + 2, generator=derive(2)) * (
        labels.view(-1, 1, 1, 1) + 1
    ) + labels.view(-1, 1, 1, 1)
    return LabeledImages(images, labels, num_classes=len(counts), normalization=Normalization((0.2, 0.4), (0.5, 0.5)))


@pytest.mark.usefixtures("global_rng_untouched")
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any), ipc=st.integers(1, 5))
def test_real_images_are_drawn_for_each_class_alone(counts: list[int], ipc: int) -> None:
    data = real(*counts).replace(columns={"age": torch.arange(sum(counts))})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = initial_images(data, ipc, generator=3)
    owned = [c for c, n in enumerate(counts) if n]
    assert made.labels.tolist() == [c for c in owned for _ in range(ipc)]
    assert (made.normalization, made.num_classes) == (data.normalization, len(counts))
    assert made.info["absent"] == [c for c, n in enumerate(counts) if not n]
    assert made.columns == {}
    assert made.info["with_replacement"] == (short := [c for c in owned if counts[c] < ipc])
    assert [f"ipc={ipc} is more than {len(short)} of" in str(one.message) for one in said] == [True] * bool(short)
    seed = int(torch.randint(2**62, (), generator=as_generator(3)))
    rows = class_rows(data)
    index = torch.cat([random_rows({c: rows[c]}, [ipc], derive(seed, c))[0] for c in owned])
    assert torch.equal(made.images, data.images[index])
    alone = initial_images(data, ipc, classes=owned[-1:], generator=3)
    assert torch.equal(alone.images, made.images[-ipc:])


def test_only_noise_starts_an_absent_class() -> None:
    data = real(3, 0, 3)
    assert initial_images(data, 1, init="noise", classes=[1]).labels.tolist() == [1]
    for init in ("real", "statistics"):
        call = lambda i=init: initial_images(data, 1, init=i, classes=[1])  # noqa: E731
        refused(call, ValueError, r"but \[1\] have none; the data has \[0, 2\]")


@pytest.mark.parametrize("whole_set", [False, True])
def test_statistics_are_sums_over_the_pixels_of_a_class_and_channel(whole_set: bool) -> None:
    """More images of a class than are read at a time; an absent class has zeros."""
    data = real(300, 10, 0).to(dtype=torch.float64)
    means, stds = class_statistics(data, whole_set=whole_set)
    assert (means.dtype, stds.dtype) == (torch.float64, torch.float64)
    for c in range(3):
        for channel in range(2):
            pixels = data.images[data.labels == c][:, channel].flatten().tolist()
            count = 310 * 24 if whole_set else max(1, len(pixels))
            mean, square = sum(pixels) / count, sum(p**2 for p in pixels) / count
            assert float(means[c, channel]) == pytest.approx(mean)
            assert float(stds[c, channel]) == pytest.approx((square - mean**2) ** 0.5)
    flat = torch.rand(50, generator=derive(0)).repeat_interleave(3).view(-1, 1, 1, 1).expand(-1, 1, 3, 5)
    classes = torch.arange(50).repeat_interleave(3)
    for c in range(50):  # rounding gives negative variances
        own = LabeledImages(flat[classes == c], torch.zeros(3, dtype=torch.int64))
        assert float(class_statistics(own, whole_set=whole_set)[1]) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("init", ["noise", "statistics", "statistics-whole-set"])
@pytest.mark.parametrize("classes", [None, [2, 0]])
def test_drawn_images_have_the_mean_and_deviation_of_their_class(init: str, classes: list[int] | None) -> None:
    """The draws, image by image, from one generator: normal noise, scaled and shifted for each class and channel."""
    data = real(3, 0, 5).to(dtype=torch.float64)
    made = initial_images(data, 2, init=init, classes=classes, generator=derive(4))
    noise, expected = torch.randn(2, 2, 2, 4, 6, generator=derive(4), dtype=torch.float64), []
    means, stds = class_statistics(data, whole_set=init == "statistics-whole-set")
    for c, own in zip((0, 2), noise, strict=True):
        mean, std = (0, 1) if init == "noise" else (x[c].view(2, 1, 1) for x in (means, stds))
        expected.append(mean + std * own)
    assert torch.allclose(made.images, torch.cat(expected), atol=1e-6)
    if init == "statistics":
        drawn = images_from_statistics(means[[0, 2]], stds[[0, 2]], ipc=2, size=(4, 6), generator=derive(4))
        assert torch.equal(drawn, made.images)
    derived = {} if init == "noise" else {"derived": "initial images"}  # noise is of no record
    absent = [1] if classes is None else []
    assert made.info == {"init": init, "with_replacement": [], "absent": absent, **derived}
    assert made.labels.tolist() == [0, 0, 2, 2]


def test_initial_set_is_copied_in_class_order() -> None:
    data, start = real(3, 3, 3), real(1, 2, 0).replace(info={"method": "old"}, columns={"age": torch.arange(3)})
    made = initial_images(data, 10, init=start)
    assert made.columns == {}
    assert made.labels.tolist() == [0, 1, 1]
    assert torch.equal(made.images, torch.cat([start.images[start.labels == c] for c in (0, 1)]))
    assert made.images.data_ptr() != start.images.data_ptr()
    assert made.info == {"init": "given", "with_replacement": [], "absent": [2], "derived": "initial images"}
    private, secret = start.replace(info={"epsilon": 1.0}), data.replace(info={"epsilon": 2.0})
    assert initial_images(secret, 1, init=private).info["epsilon"] == 1.0  # of the images that it consists of
    assert initial_images(secret, 1).info["epsilon"] == 2.0
    assert initial_images(data, 1, init=start.to(dtype=torch.float64)).images.dtype == torch.float32
    for init in (start, "real", "noise"):
        assert initial_images(data, 1, init=init, classes=[0]).info["absent"] == []
    with pytest.raises(ValueError, match="different normalizations"):
        initial_images(data, 1, init=start.replace(normalization=Normalization((0.0,), (1.0,))))


def test_initial_images_shrink_real_ones_draw_noise_and_keep_a_tiled_set() -> None:
    data = LabeledImages(torch.randn(36, 1, 8, 6, generator=derive(1)), torch.arange(36) % 3, num_classes=4)
    whole = initial_images(data, 8, generator=4)
    made = initial_images(data, 2, parametrize=Tiles(2), generator=4)
    assert isinstance(made, TiledImages)
    assert torch.equal(made.stored, Tiles(2).encode(whole.images))
    noise = initial_images(data, 2, init="noise", parametrize=Tiles(2), generator=4)
    assert isinstance(noise, TiledImages)
    assert torch.equal(noise.stored, initial_images(data, 2, init="noise", generator=4).images)
    again = initial_images(
        data, 9, init=made.replace(columns={"age": torch.arange(24)}, info={"epsilon": 1.0}), parametrize=Tiles(2)
    )
    assert isinstance(again, TiledImages)
    assert torch.equal(again.stored, made.stored)
    assert again.info["epsilon"] == 1.0
    assert initial_images(data, 9, init=made, parametrize=Tiles(2), classes=[2, 0]).counts().tolist() == [8, 0, 8, 0]
    whole_tiles = initial_images(data, 4, parametrize=Tiles(1))
    shrunk = initial_images(data, 9, init=whole_tiles, parametrize=Tiles(2))
    assert isinstance(shrunk, TiledImages)
    assert torch.equal(shrunk.stored, Tiles(2).encode(whole_tiles.images))
    words = r"a multiple of 4 images in each class for Tiles\(factor=2\), got \[2, 6, 0, 0\]$"
    refused(lambda: initial_images(data, 1, init=whole[[0, 1, *range(8, 14)]], parametrize=Tiles(2)), ValueError, words)
    refused(lambda: initial_images(data, 1, init="noise", parametrize=Tiles(4)), ValueError, "divisible by 4, got 8x6")
    border = int((made.labels == made.labels[-1]).nonzero()[0])
    swapped = made.labels.clone()
    swapped[[border - 1, border]] = swapped[[border, border - 1]]  # in the last two classes only
    for labels in (made.labels.roll(1), swapped):
        with pytest.raises(ValueError, match="single class in each stored image"):
            initial_images(data, 1, init=made.replace(labels=labels), parametrize=Tiles(2))


def test_invalid_arguments_are_named() -> None:
    refused(lambda: initial_images(real(2, 2), 1, init="noise", classes=[2]), ValueError, "distinct and in .0, 2.")
    soft = LabeledImages(torch.rand(2, 1, 2, 2), torch.rand(2, 3))
    refused(lambda: initial_images(soft, 1), ValueError, "labels must be class indices")
    refused(lambda: initial_images(real(2, 2), 1, init="zeros"), ValueError, "init must be one of")
    with pytest.raises(ValueError, match=r"means and stds must be \[K, C\], no std below 0, got \[2, 3\] and \[3, 2\]"):
        images_from_statistics(torch.zeros(2, 3), torch.zeros(3, 2), ipc=1, size=(2, 2))
    for means, stds, size, words in (
        (torch.zeros(2, 1), torch.tensor([[1.0], [-1e-9]]), (2, 2), "no std below 0"),
        (torch.zeros(2), torch.zeros(2, 1), (2, 2), "^means must"),
        (torch.zeros(2, 1), torch.zeros(2), (2, 2), "^stds must"),
        (torch.zeros(2, 1), torch.zeros(2, 1), (2, 0), "size must be at least 1, got 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            images_from_statistics(means, stds, ipc=1, size=size)
    assert images_from_statistics(torch.full((2, 1), 0.5), torch.zeros(2, 1), ipc=1, size=(2, 2)).eq(0.5).all()
    for function in (class_statistics, lambda real: initial_images(real, 1)):
        refused(lambda f=function: f(3), TypeError, "^real must")
    with pytest.raises(FloatingPointError, match="stds are too large for torch.float32"):
        images_from_statistics(torch.zeros(2, 3), torch.full((2, 3), 3e38), ipc=5, size=(2, 2))
