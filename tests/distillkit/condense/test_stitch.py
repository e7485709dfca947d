from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit import LabeledImages
from distillkit.condense import stitch
from distillkit.condense.stitch import _boxes, _Scoring
from distillkit.data import open_npz
from distillkit.networks import build
from distillkit.rng import derive
from distillkit.select import prune_by_confidence
from tests.distillkit.labels.toys import CLASSES, convnet, stripes, trained_teacher


class Dark(nn.Module):
    """Observer that prefers class 0, the more the darker the image."""

    def forward(self, images: Tensor) -> Tensor:
        mean = images.flatten(1).mean(1)
        return torch.stack([9 - mean, torch.zeros_like(mean)], 1)


class Reordered(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images).roll(1, 1)


def constants(count: int, side: int, width: int | None = None) -> LabeledImages:
    """Return images that are constant: image i has the value i."""
    images = torch.arange(float(count)).view(-1, 1, 1, 1).expand(-1, 1, side, width or side) / 8
    return LabeledImages(images.clone(), torch.zeros(count, dtype=torch.int64), num_classes=2)


def test_ranks_fill_the_same_cell_of_every_mosaic() -> None:
    with pytest.warns(UserWarning, match=r"factor=2 makes mosaics of crops of 2x2 pixels"):
        made = stitch(constants(8, 4), observer=Dark(), ipc=2, factor=2)
    cells = made.images[:, 0, ::2, ::2] * 8
    assert cells.tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert torch.equal(made.images, made.images[:, :, ::2, ::2].repeat_interleave(2, 2).repeat_interleave(2, 3))
    assert made.labels.tolist() == [0, 0]
    best = torch.tensor([9.0, 9.0 - 1 / 8]).sigmoid()  # the observer's probabilities of the first two images
    assert stitch(constants(8, 4), observer=Dark(), ipc=2).info["confidence"] == pytest.approx(
        float(best.mean()), abs=1e-6
    )


def test_the_first_cells_are_larger_where_the_factor_does_not_divide_a_side() -> None:
    with pytest.warns(UserWarning, match="factor=2"):
        made = stitch(constants(8, 5, 9), observer=Dark(), ipc=1, factor=2)
    rows = [[0] * 5 + [1] * 4, [2] * 5 + [3] * 4]
    assert (made.images[0, 0] * 8).round(decimals=3).tolist() == [rows[0]] * 3 + [rows[1]] * 2


def test_a_crop_is_cut_where_its_box_lies_and_resized_to_its_cell() -> None:
    picture, scoring = torch.rand(3, 6, 10, generator=derive(0)), _Scoring(Dark(), 2, 1, 1.0, None)
    wanted = F.interpolate(picture[None, :, 1:6, 4:7], (3, 5), mode="bilinear", antialias=True)[0]
    assert torch.allclose(scoring._cut(picture, (1, 4, 5, 3)), wanted, atol=1e-6)
    assert torch.equal(scoring._cut(picture, (2, 1, 3, 5)), picture[:, 2:5, 1:6])


def test_the_darkest_crops_of_each_image_are_chosen() -> None:
    images = torch.ones(3, 1, 4, 4)
    images[0, 0, :2, :2] = -1.0
    images[2] = -0.5
    data = LabeledImages(images, torch.zeros(3, dtype=torch.int64), num_classes=2)
    with pytest.warns(UserWarning, match="too few images to decide; pass real training images to try the observer"):
        made = stitch(data, observer=Dark(), ipc=2, crops=200, min_scale=0.2)
    assert torch.equal(made.images[0], torch.full((1, 4, 4), -1.0))
    assert torch.equal(made.images[1], torch.full((1, 4, 4), -0.5))


def test_whole_images_are_those_that_confidence_pruning_keeps() -> None:
    data, teacher = stripes(60, noise=0.3), trained_teacher()
    logits = teacher(data.images).detach()
    assert torch.equal(logits.argmax(1), data.labels)
    for ipc in (1, 4, 20):
        made = stitch(data, observer=teacher, ipc=ipc, min_scale=1.0, crops=2)
        kept = data[prune_by_confidence(logits, keep=ipc * CLASSES, strategy="bottom")]
        for c in range(CLASSES):
            ours, theirs = (x.images[x.labels == c].flatten(1) for x in (made, kept))
            assert sorted(ours.tolist()) == sorted(theirs.tolist())


def test_a_set_says_that_it_publishes_real_pixels() -> None:
    data = stripes(60)
    teacher = trained_teacher().train()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    made = stitch(data, observer=teacher, ipc=2, pool=5, classes=[0, 2], generator=4)
    assert "publishes=pixels of real images" in repr(made)
    facts = {"method": "stitch", "ipc": 2, "factor": 1, "pool": 5, "crops": 5, "min_scale": 0.08, "generator": 4}
    assert {name: made.info[name] for name in facts} == facts
    assert (made.info["absent"], made.info["with_replacement"]) == ([], [])
    assert made.info["observer"]["accuracy"] > 0.8
    assert 0.3 < made.info["confidence"] <= 1
    assert made.labels.tolist() == [0, 0, 2, 2]
    assert teacher.training
    dropped = nn.Sequential(nn.Dropout(0.9), teacher)
    again = stitch(data, observer=dropped, ipc=2, pool=5, classes=[0, 2], generator=4)
    assert torch.equal(again.images, made.images)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_classes_on_several_machines_give_the_same_bits() -> None:
    data, teacher = stripes(60), trained_teacher()
    whole = stitch(data, observer=teacher, ipc=3, pool=8, generator=5)
    parts = [stitch(data, observer=teacher, ipc=3, pool=8, generator=5, classes=own) for own in ([0, 2], [1])]
    assert torch.equal(whole.images, torch.cat([parts[0].images[:3], parts[1].images, parts[0].images[3:]]))
    other = stitch(data, observer=teacher, ipc=3, pool=8, generator=6)
    assert not torch.equal(whole.images, other.images)


def test_stored_images_are_read_by_rows(tmp_path: Path) -> None:
    data = stripes(60)
    pixels = ((data.images + 3) * 40).clamp(0, 255).to(torch.uint8)
    arrays = {"images": pixels.permute(0, 2, 3, 1).numpy(), "labels": data.labels.numpy()}
    np.savez(tmp_path / "a.npz", **{f"{part}_{name}": x for part in ("train", "test") for name, x in arrays.items()})
    stored = open_npz(tmp_path / "a.npz", cache=tmp_path / "cache").train
    one, two = (stitch(x, observer=trained_teacher(), ipc=2, pool=9) for x in (stored, stored.read()))
    assert torch.equal(one.images, two.images)
    assert one.info == two.info
    for name, value in (("labels", data.labels), ("num_classes", 3), ("normalization", stored.normalization)):
        with pytest.raises(TypeError, match=f"{name} must be left out when images is a StoredImages"):
            stitch(stored, observer=trained_teacher(), **{name: value})


def test_chunks_and_devices_do_not_change_the_choice() -> None:
    data, teacher = stripes(60), trained_teacher()
    one, two = (stitch(data, observer=teacher, ipc=2, chunk=chunk, device="cpu") for chunk in (None, 7))
    assert torch.equal(one.images, two.images)
    assert torch.equal(one.images, stitch(data, observer=teacher.double(), ipc=2).images)


def test_an_observer_at_the_level_of_chance_is_refused() -> None:
    data = stripes(90)
    with pytest.raises(ValueError, match=r"observer is right on .* of the pool.* Its classes have another order"):
        stitch(data, observer=Reordered(trained_teacher()), ipc=1)
    with pytest.raises(ValueError, match=r"observer is right on .* not clearly better than chance"):
        stitch(data, observer=build(convnet, 1), ipc=1)
    with pytest.raises(TypeError, match="observer must be a trained network"):
        stitch(data, observer=convnet, ipc=1)  # type: ignore[arg-type]


def test_small_pools_and_classes() -> None:
    data, teacher = stripes(60), trained_teacher()
    few = data[torch.cat([torch.arange(55), torch.tensor([57])])].replace(columns={})
    with pytest.raises(ValueError, match=r"pool must be at least ipc \* factor\*\*2 = 6"):
        stitch(data, observer=teacher, ipc=6, pool=5)
    assert len(stitch(data, observer=teacher, ipc=6, pool=6)) == 18
    with pytest.warns(UserWarning, match=r"ipc \* factor\*\*2=20 is more than 2 of 3 classes have: 1 \(18\), 2 \(18\)"):
        made = stitch(few, observer=teacher, ipc=20)
    assert made.info["with_replacement"] == [1, 2]
    own = made.images[made.labels == 1]
    assert torch.equal(own[:2], own[18:])
    for options, words in (
        ({"factor": 0}, "factor"), ({"factor": 9}, "factor must be at most"), ({"crops": 0}, "crops"),
        ({"min_scale": 1.1}, "min_scale"), ({"ipc": 0}, "ipc"), ({"pool": 0}, "pool"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            stitch(data, observer=teacher, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "factor"), [((95, 200), 1), ((200, 95), 1), ((96, 96), 2)])
def test_the_default_factor_depends_on_the_shorter_side(size: tuple[int, int], factor: int) -> None:
    made = stitch(constants(8, *size), observer=Dark(), ipc=1, crops=1)
    assert made.info["factor"] == factor


def test_an_observer_that_fails_on_crops_is_refused() -> None:
    class Edged(Dark):
        def forward(self, images: Tensor) -> Tensor:
            framed = images[:, 0, 0, 0] == 0
            return super().forward(images).masked_fill(framed[:, None], torch.inf)

    data = LabeledImages(torch.ones(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64), num_classes=2)
    with pytest.warns(UserWarning, match="factor=2"), pytest.raises(ValueError, match="does not for crops of class 0"):
        stitch(data, observer=Edged(), ipc=1, factor=2)


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.integers(0, 99))
def test_crops_lie_in_the_image_and_are_large_enough(h: int, w: int, min_scale: float, seed: int) -> None:
    top, left, height, width = _boxes(20, 3, min_scale, (h, w), derive(seed)).unbind(-1)
    assert int(top.min()) >= 0
    assert int(left.min()) >= 0
    assert int((top + height).max()) <= h
    assert int((left + width).max()) <= w
    assert float(height.min()) >= min_scale**0.5 * h - 0.5
    assert float(width.min()) >= max(1, min_scale**0.5 * w - 0.5)


def test_areas_are_uniform_and_crops_lie_anywhere_in_oblong_images() -> None:
    boxes = _boxes(2000, 3, 0.25, (40, 100), derive(3)).double().flatten(0, 1)
    top, left, height, width = boxes.unbind(1)
    area = height * width / 4000
    assert float(area.mean()) == pytest.approx(0.625, abs=0.01)
    assert float(area.std()) == pytest.approx(0.75 / 12**0.5, abs=0.01)
    assert torch.allclose(width / height, torch.tensor(2.5).double(), atol=0.15)
    for place, free in ((top, 40 - height), (left, 100 - width)):
        room = free > 8
        share = place[room] / free[room]
        assert float(share.mean()) == pytest.approx(0.5, abs=0.02)
        assert (float(share.min()), float(share.max())) == (0, 1)
    both = (height < 30) & (width < 80)
    places = torch.stack([top / (40 - height), left / (100 - width)])[:, both]
    assert abs(float(torch.corrcoef(places)[0, 1])) < 0.05
    assert len(boxes.unique(dim=0)) > 3000


def test_classes_have_their_own_pools_and_crops() -> None:
    images = torch.rand(40, 1, 12, 12, generator=derive(0))
    data = LabeledImages(torch.cat([images, images]), torch.arange(2).repeat_interleave(40), num_classes=2)

    class Right(nn.Module):
        """Observer that knows the class of whole images only by their order, so that all crops score alike."""

        def forward(self, crops: Tensor) -> Tensor:
            return torch.zeros(len(crops), 2)

    with pytest.warns(UserWarning, match="too few"):
        made = stitch(data, observer=Right(), ipc=4, pool=10, generator=1)
    assert made.info["confidence"] == pytest.approx(0.5)
    assert made.info["pool"] == 10
    own, other = (x.flatten(1) for x in made.images.split(4))
    assert not torch.equal(own, other)


@pytest.mark.parametrize(("side", "framed"), [((6, 6), (1, 1)), ((7, 9), (2, 2)), ((5, 8), (1, 2))])
def test_observer_sees_crops_in_the_middle_of_zeros(side: tuple[int, int], framed: tuple[int, int]) -> None:
    seen = []

    class Watching(nn.Module):
        def forward(self, crops: Tensor) -> Tensor:
            seen.append(crops)
            return torch.stack([crops.flatten(1).sum(1), torch.zeros(len(crops))], 1)

    data = LabeledImages(torch.ones(6, 1, *side), torch.zeros(6, dtype=torch.int64), num_classes=2)
    with pytest.warns(UserWarning, match="factor=2"):
        stitch(data, observer=Watching(), ipc=1, factor=2, crops=2)
    crop = seen[-1][0, 0]
    wanted = torch.zeros(side)
    h, w = side[0] // 2, side[1] // 2
    wanted[framed[0] : framed[0] + h, framed[1] : framed[1] + w] = 1
    assert torch.equal(crop, wanted)
