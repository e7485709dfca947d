"""Mistakes in trainings, tests and labels that give plausible numbers are named, and valid calls cause no warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization, _evaluation_checks
from distillkit._evaluation_checks import check_baseline, check_factor, check_test_images, images_among
from distillkit._utils.user_warnings import each_warning_once, warn
from distillkit.augment import ResizedCrop, ShufflePatches
from distillkit.data import Split, open_npz
from distillkit.evaluate import evaluate
from distillkit.labels import Relabel, soft_labels, stored_soft_labels
from distillkit.labels._teacher import teacher_logits, try_teacher
from distillkit.networks import build
from distillkit.protocols import PROTOCOLS
from distillkit.robustness import FGSM, PGD, Corruption, Perturbation
from distillkit.scores import scores
from distillkit.study import Task
from distillkit.training import CLASSIC, Protocol, accuracy, train
from tests.distillkit.labels.toys import convnet, stripes, trained_teacher
from tests.refused import refused

SHORT = replace(CLASSIC, epochs=1)
SMALL, REAL, TEST = stripes(9, 1, 0.4), stripes(120, 2, 0.4), stripes(60, 3, 0.4)


def said(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in seen if "images range" not in str(one.message)]


def measure(data: Any = SMALL, test: Any = TEST, factory: Any = convnet, **options: Any) -> Any:
    options = {"protocol": SHORT, "num_networks": 2, "progress": False, **options}
    return evaluate(data, test, factory, **options)


def pixels(count: int, seed: int, channels: int = 3) -> LabeledImages:
    levels = torch.randint(256, (count, channels, 7, 9), generator=torch.Generator().manual_seed(seed))
    return LabeledImages(levels / 255, torch.arange(count) % 3, num_classes=3)


def score(data: Any, real: Any, **options: Any) -> Any:
    augmented = replace(SHORT, augment=lambda x, generator, *, siamese=False: x)
    how = {"num_networks": 1, "progress": False, "protocol": augmented, **options}
    return scores(data, TEST, convnet, real=real, **how)


def taught(teacher: nn.Module) -> Protocol:
    return replace(SHORT, relabel=Relabel(teacher))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 7 * 9, 3))


@pytest.mark.parametrize("change", ["none", "normalized", "permuted", "subset", "8 bits", "half"])
def test_test_images_among_training_images_are_counted_once(change: str) -> None:
    test, other = pixels(40, 0), pixels(90, 1)
    leaked = test
    if change == "permuted":
        leaked = test[torch.randperm(40, generator=torch.Generator().manual_seed(4))]
    if change == "subset":
        leaked = test[torch.arange(0, 40, 4)]
    real = LabeledImages.concatenate([other, leaked, leaked])
    if change == "8 bits":  # the test set has pixels between the levels of the stored training images
        noise = torch.rand(test.images.shape, generator=torch.Generator().manual_seed(5)) - 0.5
        test = test.replace(images=(test.images + noise / 255).clamp(0, 1))
    norm = Normalization((0.3, 0.5, 0.6), (0.2, 0.25, 0.3)) if change == "normalized" else None
    small = pixels(6, 2)
    if norm is not None:
        real, small, test = (one.renormalize(norm) for one in (real, small, test))
    if change == "half":
        real = real.to(dtype=torch.float16).to(dtype=torch.float32)
    found = said(lambda: measure(small, test, linear, real=real))
    least = 30 if change == "8 bits" else len(leaked)
    [text] = [one for one in found if "images of test are also in real" in one]
    assert least <= int(text.split()[0]) <= len(leaked)
    assert said(lambda: measure(small, test, linear, real=other if norm is None else other.renormalize(norm))) == []


@pytest.mark.parametrize(("levels", "same"), [(1, True), (2, False)])
def test_images_are_equal_up_to_rounding(levels: int, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pattern that no mean over a block shows, whatever the number of images that are compared at a time."""
    monkeypatch.setattr(_evaluation_checks, "_CHUNK", 7)
    monkeypatch.setattr(_evaluation_checks, "_VALUES", 400 if same else 9)
    data = LabeledImages(torch.full((20, 3, 8, 8), 0.5), torch.arange(20) % 3, num_classes=3)
    data = data.replace(images=data.images + torch.arange(20).view(-1, 1, 1, 1) / 64)
    signs = (-1.0) ** (torch.arange(8)[:, None] + torch.arange(8))
    among = LabeledImages.concatenate([data.replace(images=data.images + 9 / 255 * signs.roll(1, 0)), data])
    pixel = torch.zeros(8, 8).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1.0))
    for change in (signs, pixel, -pixel):
        moved = data.replace(images=data.images + levels / 255 * change)
        for space in (data.normalization, Normalization((0.2, 0.3, 0.4), (0.5, 0.6, 0.7))):
            assert images_among(moved, among.renormalize(space)).tolist() == [same] * 20
    assert [images_among(*sets).tolist() for sets in ((data[:0], data), (data[:2], drawn([2])))] == [[], [False] * 2]
    check_baseline(data, LabeledImages.concatenate([data[:14], among[:6]]), relabel=None)  # some parts are in data


NOTED: dict[str, tuple[Callable[[], Any], str]] = {
    "the set is the test set": (lambda: measure(TEST, TEST), "60 of 60 images of test are also in data"),
    "real is the test set": (lambda: measure(real=TEST), "60 of 60 images of test are also in real"),
    "swapped": (lambda: measure(REAL, SMALL), "test has 9 images and data has 120.*arguments swapped"),
    "swapped, made": (
        lambda: measure(REAL, stripes(90, 7).replace(info={"method": "random"})),
        "test has 90 images, made by 'random', and data has 120",
    ),
    "scores": (
        lambda: score(SMALL, LabeledImages.concatenate([REAL, TEST]), search=[{}, {"lr": 0.1}]),
        "60 of 60 images of test are also in real",
    ),
    "scores, data": (lambda: score(TEST[:9], REAL), "9 of 60 images of test are also in data"),
    "a study": (lambda: Task("own", Split(REAL, REAL[:5], ("a", "b", "c"))), "5 of 5 images of test are also in train"),
    "a validation set": (
        lambda: Task("own", Split(REAL, TEST[:5], ("a", "b", "c"), TEST[3:9])),
        "2 of 5 images of test are also in validation",
    ),
    "five classes": (
        lambda: check_baseline(flat([2] * 8 + [0]), flat([2, 1, 1, 1, 1, 1, 20, 2, 0]), relabel=None),
        r"in 5 classes: 1 \(1\), 2 \(1\), 3 \(1\), 4 \(1\), 5 \(1\); random",
    ),
    "six classes": (
        lambda: check_baseline(drawn([2] * 8), drawn([2, 1, 1, 1, 1, 1, 1, 20]), relabel=None),
        r"in 6 classes: 1 \(1\), 2 \(1\), 3 \(1\), 4 \(1\), 5 \(1\), \.\.\.; random",
    ),
    "softmax": (lambda: measure(factory=ending(nn.Softmax(1))), r"network \(Sequential\) must return logits.*softmax"),
    "softmax, attacked": (
        lambda: accuracy(build(ending(nn.Softmax(1)), 0), TEST01, against=FGSM(0.1)), "must return logits",
    ),
    "sigmoid": (
        lambda: try_teacher(nn.Sequential(TEACHER, nn.Hardsigmoid()), REAL[:50], "pool", role="observer"),
        r"^all outputs of observer lie in \[0, 1\], as after a sigmoid",
    ),
    "mosaics": (lambda: train(build(convnet, 0), made(factor=2), relabelled("rded")), r"data hold 2 x 2 crops"),
    "mosaics, stored": (lambda: train(build(convnet, 0), made(factor=2), stored(made(factor=2))), "hold 2 x 2 crops"),
    "mosaics, evaluated": (lambda: measure(made(factor=2), protocol=relabelled("rded")), r"data hold 2 x 2 crops"),
    "mosaics, scores": (lambda: score(made(factor=2), REAL, protocol=relabelled("rded")), r"data hold 2 x 2 crops"),
}  # fmt: skip


def drawn(counts: list[int]) -> LabeledImages:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return LabeledImages(torch.rand(len(labels), 1, 4, 4), labels, num_classes=len(counts))


def flat(counts: list[int]) -> LabeledImages:
    """Return images with equal probabilities of all classes, and their classes as a column."""
    hard = drawn(counts)
    return hard.replace(labels=torch.full((len(hard), len(counts)), 1 / len(counts)), columns={"class": hard.labels})


@pytest.mark.parametrize(("info", "augment", "relabel", "words"), [
    ({"factor": 3}, None, True, ("1 x 1", "3 x 3", f"augment=ShufflePatches(3, augment={ResizedCrop(1 / 3)})")),
    ({"factor": 2}, ShufflePatches(3), False,
     ("3 x 3", "2 x 2", f"PROTOCOLS['rded-factor-2'], or augment=ShufflePatches(2, augment={ResizedCrop(0.5)})")),
    ({"method": "stitch"}, ShufflePatches(2), False,
     ("2 x 2", "1 x 1", f"PROTOCOLS['rded'], or augment={ResizedCrop(1.0)}")),
    ({}, ShufflePatches(2), True, None), ({"factor": 2}, None, False, None), ({"factor": 1}, None, True, None),
    ({"factor": 2}, ShufflePatches(2), True, None), ({"factor": "2"}, None, True, None),
])  # fmt: skip
def test_patches_and_crops_are_compared(info: Any, augment: Any, relabel: bool, words: Any) -> None:
    text = "protocol shuffles {} patches, but the images of data hold {} crops (info['factor']); use {}"
    assert said(lambda: check_factor(info, augment, relabel=relabel)) == ([text.format(*words)] if words else [])


@pytest.mark.parametrize(("count", "total", "swapped"), [(20, 100, True), (21, 100, False), (31, 200, False)])
def test_a_small_test_set_seems_to_be_the_small_set(count: int, total: int, swapped: bool) -> None:
    few, many = drawn([count, 0, 0]), drawn([total, 0, 0])
    assert len(said(lambda: check_test_images(few, {"data": many, "real": None}))) == swapped
    assert said(lambda: check_test_images(few, {"data": drawn([9, 0, 0]), "real": many})) == []
    assert said(lambda: check_test_images(many.replace(info={"method": "x"}), {"data": drawn([total, 0, 0])})) == []
    [text] = said(lambda: check_test_images(many[:count], {"data": many}))
    assert text.startswith(f"{count} of {count} images of test are also in data, so")


def ending(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(convnet(), layer)


def made(**info: Any) -> LabeledImages:
    return stripes(12, 6, 0.2).replace(info={"method": "stitch", **info})


def relabelled(name: str) -> Protocol:
    return replace(PROTOCOLS[name].with_teacher(TEACHER), epochs=1)


def stored(data: LabeledImages) -> Protocol:
    own = relabelled("rded")
    return replace(own, relabel=stored_soft_labels(data, own, pool=REAL))


TEACHER = trained_teacher()
TEST01 = TEST.replace(images=TEST.images.sigmoid())


@pytest.mark.parametrize("call", NOTED)
def test_a_probable_mistake_is_named_once(call: str) -> None:
    function, text = NOTED[call]
    found = said(function)
    assert len(found) == len(set(found)) <= 2
    assert len([one for one in found if re.search(text, one)]) == 1, found


def test_each_warning_is_given_once_in_a_block() -> None:
    levels: list[bool] = []

    def work() -> None:
        with each_warning_once() as outer:
            for message in ("a", "a", "b"):
                warn(message)
            with each_warning_once() as inner:
                warn("a")
        levels.extend((outer, inner))
        warn("a")

    assert said(work) == ["a", "b", "a"]
    with pytest.warns(UserWarning, match="^c$") as seen:
        warn("c")
    assert seen[0].filename == __file__
    assert levels == [True, False]


def test_valid_calls_cause_no_warning() -> None:
    real = soft_labels(REAL, TEACHER)
    log = lambda: nn.Sequential(convnet(), nn.LogSoftmax(1))  # noqa: E731
    calls: list[Callable[[], Any]] = [
        lambda: measure(real=REAL),
        lambda: measure(soft_labels(SMALL, TEACHER, pool=REAL), real=real),
        lambda: measure(factory=log),
        lambda: measure(soft_labels(SMALL, TEACHER, pool=REAL), protocol=relabelled("sre2l"), real=REAL),
        lambda: measure(made(factor=2), protocol=relabelled("rded-factor-2"), real=REAL),
        lambda: measure(made(factor=1), protocol=relabelled("rded")),
        lambda: measure(made(factor=2)),
        lambda: accuracy(build(ending(nn.Softmax(1)), 0), TEST),
        lambda: soft_labels(SMALL, nn.Sequential(TEACHER, nn.LogSoftmax(1)), pool=REAL),
        lambda: try_teacher(nn.Sequential(TEACHER, nn.Hardtanh(-0.1, 1.0)), REAL, "pool"),
        lambda: try_teacher(nn.Sequential(TEACHER, nn.Hardtanh(0.0, 1.1)), REAL, "pool"),
    ]
    assert [said(call) for call in calls] == [[]] * len(calls)


class Broken(Perturbation):
    """Perturbation that returns a given value."""

    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        self.value = value

    def __call__(self, pixels: Tensor, labels: Tensor, logits: Any, generator: torch.Generator) -> Tensor:
        return self.value(pixels)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return "broken"


class NaNAbove(nn.Module):
    """Network that returns NaN for bright images, but not for the noise of the first check."""

    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body or convnet()

    def forward(self, images: Tensor) -> Tensor:
        bright = images.flatten(1).amax(1) > 1e3
        return self.body(images.clamp(-3, 3)).masked_fill(bright[:, None] & (torch.arange(3) == 1), torch.nan)


def test_step_on_an_accelerator_does_not_wait_for_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distillkit.labels._teacher.is_accelerator", lambda device: True)
    assert teacher_logits(NaNAbove(), bright(5).images, step=True).isnan().any()
    refused(lambda: teacher_logits(NaNAbove(), bright(5).images), ValueError, "teacher returns NaN")


def bright(count: int) -> LabeledImages:
    data = stripes(count, 5)
    return data.replace(images=torch.where((torch.arange(count) % 5 == 4).view(-1, 1, 1, 1), 1e4, data.images))


UNTRAINED, SOFTMAX = build(convnet, 3), nn.Sequential(TEACHER, nn.Softmax(1))
BRIGHT, COUNTS = Normalization((0,), (1e-5,)), torch.arange(480)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "soft against hard": (
        lambda: measure(soft_labels(SMALL, TEACHER, pool=REAL), real=REAL), "^data has soft labels and real has class",
    ),
    "hard against soft": (lambda: measure(real=soft_labels(REAL, TEACHER)), "^real has soft labels and data has class"),
    "soft against hard in scores": (
        lambda: score(soft_labels(SMALL, TEACHER, pool=REAL), REAL), "from the same teacher",
    ),
    "real is smaller, relabelled": (lambda: measure(REAL, real=SMALL, protocol=relabelled("rded")), "^real .*got 9"),
    "real is smaller": (lambda: measure(REAL, real=SMALL), r"at least as many as data has \(120\).*got 9"),
    "real lacks a class": (
        lambda: measure(real=REAL[(REAL.labels != 1).nonzero().flatten()]),
        r"^real must have images of each class of data, but has none of \[1\]$",
    ),
    "stored labels": (lambda: measure(real=REAL, protocol=stored(SMALL)), "^protocol must have a teacher to label "),
    "stored labels, scored": (lambda: score(SMALL, REAL, protocol=stored(SMALL)), "^protocol must have a teacher"),
    "real is the set": (lambda: measure(real=SMALL), "all of its images are in data"),
    "softmax": (lambda: soft_labels(SMALL, SOFTMAX, pool=REAL), r"teacher .*softmax"),
    "softmax in Relabel": (lambda: train(build(convnet, 0), SMALL, taught(SOFTMAX)), r"teacher .*softmax"),
    "softmax in stored labels": (lambda: stored_soft_labels(SMALL, taught(SOFTMAX)), r"teacher .*softmax"),
    "untrained": (lambda: train(build(convnet, 0), REAL, taught(UNTRAINED)), "not clearly better than chance"),
    "NaN of a teacher": (lambda: soft_labels(bright(60), NaNAbove()), r"teacher returns NaN for 12 of 60 .*first: 4"),
    "NaN of a teacher for views": (
        lambda: train(build(convnet, 0), TEST, replace(
            taught(NaNAbove(TEACHER)), augment=lambda x, generator, *, siamese: 1e4 * x
        )),
        "teacher returns NaN for 60 of 60",
    ),
    "NaN of a network": (lambda: accuracy(NaNAbove(), bright(20)), r"NaNAbove\) returns NaN for 4 of 20 .*first: 4"),
    "NaN of a network, corrupted": (
        lambda: accuracy(NaNAbove(), TEST01.renormalize(BRIGHT), against=Corruption("contrast", 1)),
        r"NaNAbove\) returns NaN for 60 of 60 images of data under contrast 1",
    ),
    "NaN of a perturbation": (
        lambda: accuracy(convnet(), TEST01, against=Broken(lambda x: x + (COUNTS % 99).log().view(60, 1, 1, 8))),
        "broken must return finite pixels, but 5 of 60 images hold",
    ),
    "pixels in 0..255": (lambda: accuracy(convnet(), TEST01, against=Broken(lambda x: 255 * x)), r"pixels in \[0, 1\]"),
    "8-bit pixels": (
        lambda: accuracy(convnet(), TEST01, against=Broken(lambda x: (255 * x).byte())), "got torch.uint8; divide",
    ),
    "FGSM(8)": (lambda: FGSM(8), "epsilon must be below 1, because .*, got 8; .*pass 8 / 255"),
    "FGSM(1)": (lambda: FGSM(1), "epsilon must be below 1"),
    "PGD(step_size=2)": (lambda: PGD(8 / 255, step_size=2), "step_size must be below 1, .*pass 2 / 255"),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED)
def test_a_certain_mistake_is_refused(call: str) -> None:
    function, text = REFUSED[call]
    refused(function, ValueError, text)


def test_a_stored_test_set_is_compared(tmp_path: Path) -> None:
    test = pixels(40, 0)
    levels = (255 * test.images).round().byte().permute(0, 2, 3, 1).numpy()
    labels = test.labels.numpy()
    np.savez(tmp_path / "x.npz", train_images=levels, test_images=levels, train_labels=labels, test_labels=labels)
    opened = open_npz(tmp_path / "x.npz", cache=tmp_path / "cache", progress=False).test
    train = open_npz(tmp_path / "x.npz", cache=tmp_path / "cache", progress=False).train
    assert images_among(train, opened[torch.arange(5, 8)]).nonzero().flatten().tolist() == [5, 6, 7]
    [text] = said(lambda: measure(test[:9].renormalize(opened.normalization), opened, linear))
    assert text.startswith("9 of 40 images of test are also in data")
