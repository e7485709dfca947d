from __future__ import annotations

import copy
import math
import statistics
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit import LabeledImages
from distillkit.condense import stitch
from distillkit.labels._teacher import describe_teacher
from distillkit.networks import build
from distillkit.rng import as_generator, derive
from tests.distillkit.labels.toys import convnet, stripes, trained_teacher
from tests.refused import refused


class Dark(nn.Module):
    """Observer that prefers class 0, the more the darker the image."""

    def forward(self, images: Tensor) -> Tensor:
        mean = images.flatten(1).mean(1)
        return torch.stack([9 - mean, torch.zeros_like(mean)], 1)


def slow_stitch(
    data: LabeledImages, observer: nn.Module, c: int, *, ipc: int, factor: int, pool: int | None, crops: int,
    min_scale: float, seed: int,
) -> tuple[list[Tensor], list[float]]:  # fmt: skip
    """Return the images of a class, crop by crop and cell by cell, and the probabilities of their crops."""
    own, (_, h, w) = (data.labels == c).nonzero().flatten(), data.shape
    own = own[torch.randperm(len(own), generator=derive(seed, c, "pool"))[:pool].sort().values]
    draws = torch.rand(3, len(own), crops, generator=derive(seed, c, "crops"), dtype=torch.float64).permute(1, 2, 0)
    a, b, best = h // factor, w // factor, []
    for image, five in zip(data.images[own], draws.tolist(), strict=True):
        cut, framed = [], torch.zeros(crops, *data.shape, dtype=data.images.dtype)
        for k, (area, down, right) in enumerate(five):
            share = math.sqrt(min_scale + (1 - min_scale) * area)  # uniform areas, anywhere in the image
            height, width = (max(1, round(share * side)) for side in (h, w))
            top, left = int(down * (h - height + 1)), int(right * (w - width + 1))
            crop = image[None, :, top : top + height, left : left + width]
            cut += F.interpolate(crop, (a, b), mode="bilinear", antialias=True)
            framed[k, :, (h - a) // 2 : (h - a) // 2 + a, (w - b) // 2 : (w - b) // 2 + b] = cut[-1]
        chances = observer(framed).double().log_softmax(1)[:, c].tolist()
        best.append((max(chances), cut[chances.index(max(chances))]))
    best.sort(key=lambda pair: -pair[0])
    best = [best[k % len(best)] for k in range(ipc * factor**2)]
    rows, columns = ([len(part) for part in torch.arange(side).tensor_split(factor)] for side in (h, w))
    made = []
    for i in range(ipc):
        cells = iter(crop[None] for _, crop in best[i::ipc])
        lines = [torch.cat([F.interpolate(next(cells), (row, column)) for column in columns], 3) for row in rows]
        made.append(torch.cat(lines, 2)[0])
    return made, [math.exp(chance) for chance, _ in best]


@pytest.mark.parametrize(("shape", "chosen", "options"), [
    ((1, 2, 13), None, {"ipc": 4, "factor": 1, "pool": 7, "crops": 5, "min_scale": 0.0}),
    ((2, 4, 7), [2, 0], {"ipc": 2, "factor": 3, "pool": None, "crops": 3, "min_scale": 0.3}),
    ((3, 7, 11), None, {"ipc": 1, "factor": 2, "pool": 5, "crops": 1, "min_scale": 1.0}),
    ((1, 7, 12), [0, 1], {"ipc": 30, "factor": 1, "pool": None, "crops": 2, "min_scale": 1.0}),  # with ties
])  # fmt: skip
@pytest.mark.parametrize(("chunk", "scale", "dtype"), [(None, 1, torch.float64), (7, 100, torch.float32)])
def test_sets_equal_those_of_a_slow_search(
    shape: tuple[int, int, int], chosen: list[int] | None, options: dict[str, Any], chunk: int | None, scale: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Unequal classes, of which one is absent, oblong images, sides that the factor does not divide, and an observer
    whose probabilities are 1 in single precision.
    """
    images = torch.randn(44, *shape, generator=derive(0), dtype=dtype)
    images[-6:] = images[:6]
    data = LabeledImages(images, torch.tensor([0] * 12 + [1] * 17 + [2] * 9 + [0] * 6), num_classes=4)
    data = data.replace(info={"epsilon": 1.0}, columns={"age": torch.arange(44)})
    layers = lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 4), nn.Dropout(0.9))  # noqa: E731
    observer = build(layers, 3).to(dtype).train()
    observer[1].weight.data *= scale  # type: ignore[operator, union-attr]
    before = copy.deepcopy(observer.state_dict())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # of few images and small mosaics
        made = stitch(data, observer=observer, classes=chosen, generator=4, chunk=chunk, device="cpu", **options)
    assert observer.training
    assert all(torch.equal(value, before[name]) for name, value in observer.state_dict().items())
    seed, classes = int(torch.randint(2**62, (), generator=as_generator(4))), sorted(chosen or [0, 1, 2])
    found = [slow_stitch(data, observer.eval(), c, seed=seed, **options) for c in classes]
    assert (made.labels.tolist(), made.columns) == ([c for c in classes for _ in range(options["ipc"])], {})
    torch.testing.assert_close(made.images, torch.stack([image for own, _ in found for image in own]))
    pools = [own[torch.randperm(len(own), generator=derive(seed, c, "pool"))[: options["pool"]]]
             for c, own in ((c, (data.labels == c).nonzero().flatten()) for c in classes)]  # fmt: skip
    right = torch.cat([observer(images[own]).argmax(1) == c for c, own in zip(classes, pools, strict=True)])
    facts = options | {
        "method": "stitch", "generator": 4, "seed": seed, "device": "cpu", "absent": [3] if chosen is None else [],
        "with_replacement": [c for c in classes if [18, 17, 9][c] < options["ipc"] * options["factor"] ** 2],
        "publishes": "pixels of real images", "epsilon": None,
        "confidence": pytest.approx(statistics.fmean(x for _, own in found for x in own)),
        "observer": {**describe_teacher(observer), "accuracy": float(right.double().mean())},
    }  # fmt: skip
    assert {name: made.info[name] for name in facts} == facts
    assert any("their images are repeated" in str(one.message) for one in said) == bool(facts["with_replacement"])
    assert "an observer of unknown origin" in made.info["reason"]


def test_an_observer_at_the_level_of_chance_is_refused() -> None:
    data, reordered = stripes(90), trained_teacher()
    of_two = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2))  # noqa: E731
    reordered.register_forward_hook(lambda network, inputs, logits: logits.roll(1, 1))
    with pytest.raises(ValueError, match=r"observer is right on .* of the pool.* Its classes have another order"):
        stitch(data, observer=reordered, ipc=1)
    for network, words in ((convnet, "is right on .* not clearly better"), (of_two, "must return 3 logits")):
        refused(lambda n=network: stitch(data, observer=build(n, 1), ipc=1), ValueError, f"^observer {words}")
    for wrong, came in ((convnet, "function"), (nn.Flatten, "the class Flatten")):
        with pytest.raises(
            TypeError, match=f"^observer must be an nn.Module, got {came}; call it and pass the result$"
        ):
            stitch(data, observer=wrong, ipc=1)  # type: ignore[arg-type]


def test_small_pools_and_classes() -> None:
    data, teacher = stripes(60), trained_teacher()
    assert len(stitch(data, observer=teacher, ipc=6, pool=6, min_scale=0.0)) == 18
    for dtype in (torch.float64, torch.float16):
        assert stitch(data.to(dtype=dtype), observer=teacher, ipc=1).images.dtype == dtype
    assert len(stitch(data, observer=teacher, ipc=1, factor=8)) == 3
    words = r"ipc \* factor\*\*2=20 is more than 3 of 3 classes have: 0 \(19\), 1 \(19\), 2 \(18\)"
    with pytest.warns(UserWarning, match=words):
        stitch(data[:56], observer=teacher, ipc=5, factor=2)
    for options, words in (
        ({"factor": 9}, "factor must be at most the shorter side of the images, 8, got 9"), ({"crops": 0}, "crops"),
        ({"factor": 0}, "factor"), ({"min_scale": 1.1}, "min_scale"), ({"ipc": 0}, "ipc"), ({"pool": 0}, "pool"),
        ({"pool": 7, "factor": 2, "ipc": 2}, r"pool must be at least ipc \* factor\*\*2 = 8, one image for .*, got 7"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            stitch(data, observer=teacher, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "factor"), [((95, 200), 1), ((200, 95), 1), ((96, 96), 2)])
def test_the_default_factor_depends_on_the_shorter_side(size: tuple[int, int], factor: int) -> None:
    data = LabeledImages(torch.rand(8, 1, *size), torch.zeros(8, dtype=torch.int64), num_classes=2)
    options: dict[str, Any] = {"observer": Dark(), "ipc": 1, "crops": 1}
    assert stitch(data, **options).info["factor"] == factor
    with warnings.catch_warnings(record=True) as said:
        stitch(data, factor=2, **options)
    text = f"factor=2 makes mosaics of crops of {size[0] // 2}x{size[1] // 2} pixels. Below 96 pixels"
    assert [str(one.message).startswith(text) for one in said] == [True] * (factor == 1)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_observer_that_fails_on_crops_is_refused(value: float) -> None:
    class Edged(Dark):
        def forward(self, images: Tensor) -> Tensor:
            framed = (images[:, 0, 0, 0] == 0) & (images.flatten(1).amax(1) == 1)
            return super().forward(images).masked_fill(framed[:, None] & torch.tensor([True, False]), value)

    images = (torch.arange(8) == 3).float().view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    data = LabeledImages(images, torch.zeros(8, dtype=torch.int64), num_classes=2)
    with pytest.warns(UserWarning, match="factor=2"), pytest.raises(ValueError, match="does not for crops of class 0"):
        stitch(data, observer=Edged(), ipc=1, factor=2)
