"""Rows of a teacher, the trial of a teacher, and soft sets in training and as starts of condensers."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages
from distillkit.condense import distribution_matching, initial_images
from distillkit.evaluate import evaluate
from distillkit.labels import CutMix, Relabel, soft_labels
from distillkit.labels._teacher import _tail, try_teacher
from distillkit.networks import RandomNetworks, build
from distillkit.privacy import Event, Ledger
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


def test_labels_of_a_teacher_without_a_guarantee_end_that_of_the_images() -> None:
    private = stripes(60).replace(info={"epsilon": 8.0, "delta": 1e-5})
    soft = soft_labels(private, trained_teacher())
    assert soft.info["epsilon"] is None
    assert "a teacher without a guarantee (before: epsilon 8)" in soft.info["reason"]
    again = soft_labels(soft, trained_teacher())
    assert again.info["epsilon"] is None
    assert "epsilon" not in soft_labels(stripes(60), trained_teacher()).info


def test_guarantee_of_a_shared_ledger_covers_images_and_labels() -> None:
    ledger = Ledger(delta=1e-5)
    ledger.spend(Event("class_means", 3.0))
    images_alone = ledger.guarantee()
    private = stripes(60).replace(info=images_alone.info())
    ledger.spend(Event("class_means", 3.0))
    both = ledger.guarantee()
    assert both.epsilon is not None
    assert images_alone.epsilon is not None
    assert both.epsilon > images_alone.epsilon
    soft = soft_labels(private, trained_teacher(), guarantee=both)
    assert soft.info["epsilon"] == both.epsilon
    refused(lambda: soft_labels(stripes(60), trained_teacher(), guarantee=both), ValueError, "guarantee must be None")
    with pytest.raises(ValueError, match="pool must be None"):
        soft_labels(private, trained_teacher(), guarantee=both, pool=stripes(60))


@pytest.mark.parametrize(("changes", "accepted"), [
    ({}, True), ({"epsilon": 2.1}, True), ({"epsilon": 1.9}, False), ({"delta": 1e-6}, False), ({"delta": None}, False),
    ({"relation": "replace one"}, False), ({"epsilon": None}, True),
])  # fmt: skip
def test_guarantee_of_labels_covers_that_of_the_images(changes: dict[str, Any], accepted: bool) -> None:
    """In the same terms: an equal epsilon covers the images, and the result states the new one only."""
    own = {"epsilon": 2.0, "delta": 1e-5, "relation": "add or remove one"}
    private, new = stripes(60).replace(info={**own, "reason": "old"}), own | changes
    call = lambda: soft_labels(private, trained_teacher(), guarantee=SimpleNamespace(info=lambda: new))  # noqa: E731
    if accepted:
        made = call().info
        assert {name: made.get(name) for name in (*own, "reason")} == {**new, "reason": None}
    else:
        refused(call, ValueError, "guarantee must cover the images and the teacher")


def pool(count: int) -> LabeledImages:
    images, labels = torch.zeros(count, 1, 8, 8), torch.arange(count) % CLASSES
    images[:, 0, 0, 0], images[:, 0, 0, 1] = torch.arange(count), labels
    return LabeledImages(images / 1, labels, num_classes=CLASSES, normalization=stripes(3).normalization)


def test_rows_are_softmax_of_the_teachers_logits() -> None:
    data, teacher = stripes(60), trained_teacher()
    soft = soft_labels(data, teacher, temperature=4.0)
    with torch.no_grad():
        expected = teacher(data.images)
    assert torch.allclose(soft.labels, (expected / 4).softmax(1), atol=1e-6)
    assert torch.allclose(soft.labels.sum(1), torch.ones(60))
    assert torch.allclose(soft.columns["logits"], expected, atol=1e-5)
    assert torch.equal(soft.columns["class"], data.labels)
    assert torch.equal(soft.images, data.images)
    told = soft.info["soft_labels"]
    assert (told["class"], told["temperature"]) == ("ConvNet", 4.0)
    assert told["fingerprint"] == Relabel(teacher).record()["teacher"]["fingerprint"]
    again = soft_labels(soft, teacher, temperature=1.0)
    assert torch.equal(again.columns["class"], data.labels)
    real = soft_labels(stripes(90, 4), teacher)
    result = evaluate(soft, data, convnet, num_networks=1, protocol=Protocol(epochs=1), real=real)
    assert [row.labels for row in result.rows] == ["one row", "one row"]
    assert "one row" in str(result)


@pytest.mark.parametrize("count", [50, 90, 300])
def test_teacher_is_accepted_exactly_if_guessing_is_worse_with_probability_99_percent(count: int) -> None:
    least = next(hits for hits in range(count + 1) if _tail(hits, count, 1 / CLASSES) <= 0.01)
    exact = sum(math.comb(count, k) * 2 ** (count - k) for k in range(least, count + 1)) / 3**count
    assert _tail(least, count, 1 / CLASSES) == pytest.approx(exact, rel=1e-9)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "all outputs of teacher")  # 0 and 5 are no outputs of a sigmoid
        assert try_teacher(Guess(least), pool(count), "pool") == least / count
    with pytest.raises(ValueError, match=f"teacher is right on {least - 1} of {count} images of pool"):
        try_teacher(Guess(least - 1), pool(count), "pool")


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
    try_teacher(teacher, pool(count), "pool")
    assert sorted({*teacher.seen} - {1}) == [
        i for i in range(0, count, stride) if i != 1
    ]  # 1: images of the shape check


def test_wrong_class_order_is_named_as_the_cause() -> None:
    with pytest.raises(ValueError, match=r"another order: .* right on 60 images \(class 0 is its 1, 1 is its 2"):
        soft_labels(pool(60), Guess(0))
    with pytest.raises(ValueError, match="Is its class order that of pool"):
        soft_labels(pool(60), build(convnet, 0), pool=stripes(90, noise=30.0))
    absent = pool(90)[(pool(90).labels != 1).nonzero().flatten()]
    with pytest.raises(ValueError, match=r"another order: .* right on 60 images \(class 0 is its 1, 2 is its 0\)"):
        soft_labels(absent, Guess(0))
    options = Protocol(epochs=1, relabel=Relabel(Guess(0)))
    for real in (None, pool(60)):
        with pytest.raises(ValueError, match=f"60 images of {'test' if real is None else 'real'}"):
            evaluate(stripes(9).replace(images=torch.rand(9, 1, 8, 8)), pool(60), convnet, protocol=options, real=real)


def test_few_images_only_warn() -> None:
    with pytest.warns(UserWarning, match="there are too few images to decide"):
        assert try_teacher(Guess(0), pool(49), "pool") == 0
    refused(lambda: try_teacher(Guess(0), pool(50), "pool"), ValueError, "not clearly better")


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
        (plain, start.labels.roll(1), "largest entry of a row"), (with_column, start.labels, "column"),
    ):  # fmt: skip
        made = initial_images(real, 3, init=soft)
        assert made.info["start_classes"] == told
        assert torch.equal(made.labels, labels.sort().values)
        assert torch.equal(made.images, start.images[labels.argsort(stable=True)])
        small = distribution_matching(real, networks=RandomNetworks(convnet), ipc=3, steps=1, init=soft, progress=False)
        assert small.info["start_classes"] == told
        assert small.labels.ndim == 1


def test_mixed_hard_labels_are_averaged_by_the_true_share() -> None:
    data, options = stripes(9), Protocol(epochs=1, batch=9, schedule="constant", mix=CutMix(), momentum=0.0)
    rows = nn.functional.one_hot(data.labels, CLASSES).float()
    one = train(build(convnet, 0), data, options, generator=4)
    two = train(build(convnet, 0), data.replace(labels=rows), options, generator=4)
    assert torch.equal(weights(one), weights(two))
    seed = int(torch.randint(2**62, (), generator=derive(4)))
    index = torch.randperm(9, generator=derive(seed, 0, "order"))
    x, partner, share = CutMix()(data.images[index], derive(seed, 0, 0, "view"))
    assert share < 0.9
    slow = build(convnet, 0)
    loss = nn.functional.cross_entropy
    y = data.labels[index]
    (share * loss(slow(x), y) + (1 - share) * loss(slow(x), y[partner])).backward()
    with torch.no_grad():
        for parameter in slow.parameters():
            assert parameter.grad is not None
            parameter.sub_(options.lr * (parameter.grad + options.weight_decay * parameter))
    assert torch.allclose(weights(one), weights(slow), atol=1e-6)
    never = replace(options, mix=CutMix(probability=0.0))
    assert not torch.equal(weights(train(build(convnet, 0), data, never, generator=4)), weights(one))
