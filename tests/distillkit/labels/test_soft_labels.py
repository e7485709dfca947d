"""Rows of a teacher, the trial of a teacher, and soft sets in training and as starts of condensers."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization
from distillkit.condense import distribution_matching, initial_images
from distillkit.evaluate import evaluate
from distillkit.labels import CutMix, Relabel, soft_labels
from distillkit.labels._teacher import describe_teacher, try_teacher
from distillkit.networks import RandomNetworks, build
from distillkit.privacy import Guarantee
from distillkit.rng import derive
from distillkit.training import Protocol, train
from tests.distillkit.labels.toys import CLASSES, convnet, stripes, trained_teacher, weights
from tests.refused import refused


class Guess(nn.Module):
    """Teacher that is right on the first `right` of the images, which hold their index and class as pixels."""

    def __init__(self, right: int, shift: int = 1, classes: int = CLASSES) -> None:
        super().__init__()
        self.right, self.shift, self.classes = right, shift, classes

    def forward(self, images: Tensor) -> Tensor:
        index, label = images[:, 0, 0, 0], images[:, 0, 0, 1].round().long().clamp(0, self.classes - 1)
        said = torch.where(index < self.right, label, (label + self.shift) % self.classes)
        return nn.functional.one_hot(said, self.classes).float() * 5


@pytest.mark.parametrize(("changes", "accepted"), [
    ({}, True), ({"epsilon": 2.1}, True), ({"epsilon": 1.9}, False), ({"delta": 1e-6}, False), ({"delta": None}, False),
    ({"relation": "replace one"}, False), ({"epsilon": None}, True),
])  # fmt: skip
def test_guarantee_of_labels_covers_that_of_the_images(changes: dict[str, Any], accepted: bool) -> None:
    """In the same terms: an equal epsilon covers the images, and the result states the new one only."""
    own = Guarantee(2.0, 1e-5, "add or remove one", 2.0, "exact")
    given = replace(own, **changes)
    how, new = {"teacher": trained_teacher(), "guarantee": given}, given.info()
    call = partial(soft_labels, stripes(60).replace(info={**own.info(), "reason": "old"}), **how)
    if accepted:
        made = call().info
        assert {name: made.get(name) for name in (*new, "reason")} == {"reason": None, **new}
    else:
        told, were = ({name: stated[name] for name in ("delta", "relation")} for stated in (new, own.info()))
        words = f"its epsilon {new['epsilon']:.4g} ({told}) is not at least the images' 2 ({were})"
        refused(call, ValueError, f"^guarantee must cover the images and the teacher, but {re.escape(words)}")
    refused(lambda: call(pool=stripes(60)), ValueError, "pool must be None")
    refused(lambda: call(guarantee=3), TypeError, "^guarantee must be a Guarantee")
    refused(lambda: soft_labels(stripes(60), **how), ValueError, "guarantee must be None")


def pool(count: int, classes: int = CLASSES) -> LabeledImages:
    images, labels = torch.zeros(count, 1, 8, 8), torch.arange(count) % classes
    images[:, 0, 0, 0], images[:, 0, 0, 1] = torch.arange(count), labels
    return LabeledImages(images, labels, num_classes=classes, normalization=stripes(3).normalization)


def test_rows_are_softmax_of_the_teachers_logits_and_their_origin_is_recorded() -> None:
    teacher = trained_teacher()
    data = stripes(60).replace(columns={"age": torch.arange(60)}, info={"epsilon": 8.0, "x": 1})
    with torch.no_grad():
        expected = teacher(data.images)
    for given, temperature in ((data, 4.0), (soft_labels(data, teacher), 0.5)):
        soft = soft_labels(given, teacher, temperature=temperature)
        torch.testing.assert_close(soft.labels, (expected / temperature).softmax(1))
        assert set(soft.columns) == {"age", "logits", "class"}
        torch.testing.assert_close(soft.columns["logits"], expected)
        assert torch.equal(soft.columns["class"], data.labels)
        assert torch.equal(soft.columns["age"], data.columns["age"])
        assert torch.equal(soft.images, data.images)
        share = float((expected.argmax(1) == data.labels).float().mean())
        told = {**describe_teacher(teacher), "temperature": temperature, "teacher_accuracy": pytest.approx(share)}
        assert (soft.info["soft_labels"], soft.info["epsilon"], soft.info["x"]) == (told, None, 1)
        assert "a teacher without a guarantee (before: epsilon 8)" in soft.info["reason"]
        assert "device" not in soft.info  # the images were not made
    assert soft_labels(data, teacher, precision="bf16").columns["logits"].dtype == torch.float32
    assert try_teacher(trained_teacher().double(), data, "pool") == pytest.approx(share)
    exact = soft_labels(data.to(dtype=torch.float64), trained_teacher().double())
    assert (exact.columns["logits"].dtype, exact.labels.dtype) == (torch.float64, torch.float64)
    fast = soft_labels(data.replace(info={}), teacher, precision="tf32").info
    assert (fast["soft_labels"]["precision"], "epsilon" in fast) == ("tf32", False)
    refused(lambda: soft_labels(data, teacher, temperature=0.0), ValueError, "^temperature must be")
    other = stripes(60).replace(normalization=Normalization((0.5,), (0.5,)))
    refused(lambda: soft_labels(data, teacher, pool=other), ValueError, "small and pool have .* pixels .* and mean")
    call = lambda: soft_labels(data[:0], teacher, pool=data)  # noqa: E731
    refused(call, ValueError, "^small must hold at least one image, got an empty set$")
    for name in ("small", "pool"):
        refused(lambda n=name: soft_labels(**{"small": data, "teacher": teacher, n: 3}), TypeError, f"^{name} must be")
    refused(lambda: soft_labels(data, trained_teacher().double()), ValueError, "teacher must have the dtype and device")
    call = lambda: try_teacher(teacher, data[:0], "the pool", role="observer")  # noqa: E731
    refused(call, ValueError, "^the pool must hold at least one image to try the observer on, got an empty set$")


@pytest.mark.parametrize("count", [50, 90, 300])
def test_teacher_is_accepted_exactly_if_guessing_is_worse_with_probability_99_percent(count: int) -> None:
    ways = [math.comb(count, k) * 2 ** (count - k) for k in range(count + 1)]
    least = next(hits for hits in range(count + 1) if sum(ways[hits:]) / 3**count <= 0.01)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "all outputs of teacher")  # 0 and 5 are no outputs of a sigmoid
        assert try_teacher(Guess(least), pool(count), "pool") == least / count
        assert try_teacher(nn.Sequential(Guess(least), nn.LogSoftmax(1)), pool(count), "pool") == least / count
        assert try_teacher(nn.Sequential(Guess(49), nn.Hardsigmoid()), pool(49), "pool") == 1  # few images may be alike
    with pytest.warns(UserWarning, match="^all outputs of observer lie in .0, 1., as after a sigmoid"):
        try_teacher(nn.Sequential(Guess(50), nn.Hardsigmoid()), pool(50), "pool", role="observer")
    call = lambda: try_teacher(Guess(least - 1), pool(count), "pool")  # noqa: E731
    refused(call, ValueError, f"^teacher is right on {least - 1} of {count} images of pool")


class Watched(Guess):
    """Teacher that notes its mode and the indices of the images that it sees."""

    def __init__(self, right: int) -> None:
        super().__init__(right)
        self.seen: list[int] = []
        self.modes: set[bool] = set()

    def forward(self, images: Tensor) -> Tensor:
        self.seen += images[:, 0, 0, 0].long().tolist()
        self.modes.add(self.training)
        return super().forward(images)


@pytest.mark.parametrize("training", [True, False])
def test_accuracy_of_a_teacher_that_errs_is_recorded_and_its_mode_kept(training: bool) -> None:
    teacher = Watched(45).train(training)
    for pool_, share in ((None, 0.75), (pool(50), 0.9)):
        soft = soft_labels(pool(60), teacher, pool=pool_)
        assert soft.info["soft_labels"]["teacher_accuracy"] == share
        right, own = torch.arange(60) < 45, soft.columns["class"]
        assert torch.equal(soft.labels.argmax(1), torch.where(right, own, (own + 1) % CLASSES))
    assert teacher.training is training
    assert teacher.modes == {False}


@pytest.mark.parametrize(("count", "stride"), [(1999, 1), (2000, 1), (2001, 2), (4000, 2), (4001, 3)])
def test_teacher_is_tried_on_evenly_spaced_images(count: int, stride: int) -> None:
    teacher = Watched(count)
    assert try_teacher(teacher, pool(count), "pool") == 1
    wanted = [i for i in range(0, count, stride) if i != 1]  # 1: images of the shape check
    assert sorted({*teacher.seen} - {1}) == wanted


class Says(nn.Module):
    """Teacher that says the next class in the list of an image's label, image after image."""

    def __init__(self, *said: str) -> None:
        super().__init__()
        self.said = said

    def forward(self, images: Tensor) -> Tensor:
        index, labels = images[:, 0, 0, 0].long(), images[:, 0, 0, 1].round().long().clamp(0, len(self.said) - 1)
        turns = index // len(self.said)
        said = torch.tensor([int(self.said[c][k % len(self.said[c])]) for c, k in zip(labels, turns, strict=True)])
        return 5 * nn.functional.one_hot(said, len(self.said)).float()


ORDER = "Its classes have another order: with its outputs reordered it would be right on "


@pytest.mark.parametrize(("said", "count", "right", "words"), [
    (["1", "2", "0"], 60, 0, rf"{ORDER}60 images \(class 0 is its 1, 1 is its 2, 2 is its 0\)\. Reorder the labels or"),
    (["1", "0", "2"], 90, 30, rf"{ORDER}90 images \(class 0 is its 1, 1 is its 0\)\. Reorder .* observer's outputs$"),
    (["110", "2", "0"], 60, 6, rf"{ORDER}54 images \(class 0 is its 1, 1 is its 2, 2 is its 0\)\."),
    (["1", "2", "3", "4", "0"], 50, 0, rf"{ORDER}50 images \(class 0 is its 1, 1 is its 2, 2 is its 3, \.\.\.\)\."),
    (["1", "2", "0", "3"], 80, 20, rf"{ORDER}80 images \(class 0 is its 1, 1 is its 2, 2 is its 0\)\."),
    (["1", "1", "0"], 60, 20, "Is its class order that of pool, and was it trained with pool's normalization"),
    (["1", "0"], 50, 0, rf"{ORDER}50 images \(class 0 is its 1, 1 is its 0\)\."),
    (["120", "201", "012"], 90, 30, ".*pass real training images to try the observer on$"),
    (["1210", "2021", "0102"], 60, 15, "Is its class order"),  # the most frequent answers are half of all
])  # fmt: skip
def test_wrong_class_order_is_named_as_the_cause(said: list[str], count: int, right: int, words: str) -> None:
    chance = f"not clearly better than chance \\({count / len(said):.0f}\\)\\. "
    text = f"^observer is right on {right} of {count} images of pool, which is {chance}{words}"
    call = lambda: try_teacher(Says(*said), pool(count, len(said)), "pool", role="observer")  # noqa: E731
    refused(call, ValueError, text)


def test_an_absent_class_and_few_images_are_told_and_the_set_that_was_tried() -> None:
    absent = pool(90)[(pool(90).labels != 1).nonzero().flatten()]
    words = r"of small, .* chance \(20\)\. .* another order: .* right on 60 images \(class 0 is its 1, 2 is its 0\)"
    refused(lambda: soft_labels(absent, Guess(0)), ValueError, f"^teacher is right on 0 of 60 images {words}")
    call = lambda: try_teacher(Says("0", "2", "1"), pool(90)[(pool(90).labels > 0).nonzero().flatten()], "it")  # noqa: E731
    refused(call, ValueError, r"another order: .* right on 60 images \(class 1 is its 2, 2 is its 1\)")
    words = r"chance \(16\); there are too few images to decide; pass real training images to try the observer on$"
    with pytest.warns(UserWarning, match=f"^observer is right on 0 of 49 images of pool, .*{words}"):
        assert try_teacher(Guess(0), pool(49), "pool", role="observer") == 0
    options = Protocol(epochs=1, relabel=Relabel(Guess(0)))
    for real in (None, pool(60)):
        with pytest.raises(ValueError, match=f"60 images of {'test' if real is None else 'real'}"):
            evaluate(stripes(9).replace(images=torch.rand(9, 1, 8, 8)), pool(60), convnet, protocol=options, real=real)
    one = LabeledImages(torch.rand(60, 1, 8, 8), torch.zeros(60, dtype=torch.int64))
    assert try_teacher(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), one, "pool") == 1  # no chance with one class


def test_rows_rounded_to_half_precision_are_renormalized() -> None:
    data = stripes(30)
    rows = torch.rand(30, CLASSES, generator=derive(0)).softmax(1)
    halved = data.replace(labels=rows.half())
    exact = halved.labels.float() / halved.labels.float().sum(1, keepdim=True)
    options = Protocol(epochs=2, batch=8)
    one, two = (train(build(convnet, 0), data.replace(labels=x), options) for x in (halved.labels, exact))
    assert torch.equal(weights(one), weights(two))
    for near, far in ((1.009, 1.011), (0.991, 0.989)):
        off = rows.clone()
        off[3] *= near
        train(build(convnet, 0), data.replace(labels=off), options)
        off[3] *= far / near
        wrong = data.replace(labels=off)
        refused(lambda wrong=wrong: train(build(convnet, 0), wrong, options), ValueError, "must be probabilities")
    negative = rows.clone()
    negative[0] = torch.tensor([1.5, -0.5, 0.0])
    with pytest.raises(ValueError, match="must be probabilities"):
        train(build(convnet, 0), data.replace(labels=negative), options)


def test_soft_sets_are_starts_of_condensers() -> None:
    real, start = stripes(60), stripes(9, seed=4)
    rows = torch.eye(CLASSES)[start.labels.roll(1)] * 0.8 + 0.1 / 1.5
    plain = start.replace(labels=rows)
    with_column = plain.replace(columns={"class": start.labels})
    for soft, labels, told in (
        (plain.replace(columns={"other": start.labels}), start.labels.roll(1), "largest entry of a row"),
        (with_column, start.labels, "column"),
    ):  # fmt: skip
        made = initial_images(real, 3, init=soft)
        assert made.info["start_classes"] == told
        assert torch.equal(made.labels, labels.sort().values)
        assert torch.equal(made.images, start.images[labels.argsort(stable=True)])
        small = distribution_matching(real, networks=RandomNetworks(convnet), ipc=3, steps=1, init=soft, progress=False)
        assert small.info["start_classes"] == told
        assert small.labels.ndim == 1


def test_mixed_hard_labels_are_one_hot_rows() -> None:
    data, options = stripes(9), Protocol(epochs=1, batch=9, schedule="constant", mix=CutMix(), momentum=0.0)
    rows = nn.functional.one_hot(data.labels, CLASSES).float()
    one = train(build(convnet, 0), data, options, generator=4)
    two = train(build(convnet, 0), data.replace(labels=rows), options, generator=4)
    assert torch.equal(weights(one), weights(two))
    rolled = train(build(convnet, 0), data.replace(labels=data.labels.roll(1)), options, generator=4)
    both = train(build(convnet, 0), data.replace(labels=(rows + rows.roll(1, 0)) / 2), options, generator=4)
    torch.testing.assert_close(weights(both), (weights(one) + weights(rolled)) / 2)  # linear in the rows
    never = replace(options, mix=CutMix(probability=0.0))
    assert not torch.equal(weights(train(build(convnet, 0), data, never, generator=4)), weights(one))
