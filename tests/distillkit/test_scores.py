"""Scores of DD-Ranking on fractions: golden values by hand, laws, and a measurement on small data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distillkit.augment import DSA
from distillkit.rng import derive
from distillkit.scores import Scores, augmentation_robust_score, label_robust_score, scores
from distillkit.sets import LabeledImages
from distillkit.training import Protocol

FRACTION = st.floats(0, 1)
ANCHORS = {"real_hard": 0.848, "data_hard": 0.489, "data_own": 0.489, "random_own": 0.260}


def test_golden_values() -> None:
    """DM on CIFAR-10 with ten images per class; and the ends of the range."""
    assert label_robust_score(**ANCHORS) == pytest.approx(0.24216620323586893, abs=1e-15)
    assert label_robust_score(real_hard=0.5, data_hard=0.5, data_own=0.3, random_own=0.3) == pytest.approx(
        0.2689414213699951, abs=1e-15
    )
    assert label_robust_score(real_hard=1, data_hard=0, data_own=0, random_own=1) == pytest.approx(0, abs=1e-15)
    assert label_robust_score(real_hard=0, data_hard=1, data_own=1, random_own=0) == pytest.approx(1)
    random = {**ANCHORS, "data_hard": 0.26, "data_own": 0.26}
    assert label_robust_score(**random) == pytest.approx(0.160567, abs=1e-6)
    assert augmentation_robust_score(
        data_augmented=0.489, random_augmented=0.260, data_plain=0.40, random_plain=0.22
    ) == pytest.approx(0.3654829570121615, abs=1e-15)


@given(FRACTION, FRACTION, FRACTION, FRACTION, FRACTION, st.floats(0, 0.5))
def test_scores_lie_in_the_unit_interval_and_rise_with_the_set(
    real: float, hard: float, own: float, random: float, weight: float, gain: float
) -> None:
    lrs = lambda x: label_robust_score(  # noqa: E731
        real_hard=real, data_hard=min(1, hard + x), data_own=min(1, own + x), random_own=random, weight=weight
    )
    ars = lambda x: augmentation_robust_score(  # noqa: E731
        data_augmented=min(1, own + x), random_augmented=random, data_plain=hard, random_plain=real, weight=weight
    )
    for score in (lrs, ars):
        assert -1e-12 <= score(0) <= score(gain) + 1e-12 <= 1 + 2e-12


@pytest.mark.parametrize("name", [*ANCHORS, "weight"])
def test_per_cent_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a fraction in .0, 1., got 48.9; divide per cent by 100"):
        label_robust_score(**{**ANCHORS, name: 48.9})


def some(count: int, seed: int) -> LabeledImages:
    labels = torch.arange(count) % 2
    images = torch.randn(count, 1, 6, 6, generator=derive(seed)) + 0.3 * (2.0 * labels - 1).view(-1, 1, 1, 1)
    return LabeledImages(images, labels, num_classes=2)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


REAL, TEST = some(200, 0), some(300, 1)
PROTOCOL = Protocol(epochs=4, lr=0.05, batch=16, augment=DSA("flip"))


def measure(data: LabeledImages, **options: Any) -> Scores:
    given: dict[str, Any] = {"real": REAL, "protocol": PROTOCOL, "num_networks": 2, "progress": False, **options}
    return scores(data, TEST, network, **given)


def test_components_and_scores_agree_and_equal_seeds_give_equal_results() -> None:
    found, again = measure(REAL[:20]), measure(REAL[:20])
    assert found.record() == again.record()
    rows = {name: row.mean for name, row in found.rows.items()}
    assert found.hlr == rows["real, hard"] - rows["set, hard"]
    assert found.ior == rows["set"] - rows["random"]
    alpha = (found.ior - found.hlr) / 2
    assert found.lrs == pytest.approx((math.exp(alpha) - math.exp(-1)) / (math.e - math.exp(-1)))
    beta = (found.ior + rows["set, no augmentation"] - rows["random, no augmentation"]) / 2
    assert found.ars == pytest.approx((math.exp(beta) - math.exp(-1)) / (math.e - math.exp(-1)))
    assert found.rows["set, hard"].accuracies != found.rows["set, no augmentation"].accuracies
    assert f"LRS {found.lrs:.3f}" in str(found)


def test_random_images_gain_nothing_over_random_images() -> None:
    """The mean of IOR over eight random sets is within three standard errors of 0."""
    gains = torch.tensor([measure(REAL[20 * i : 20 * i + 20], generator=i).ior for i in range(8)])
    assert abs(gains.mean()) < 3 * gains.std() / math.sqrt(8) + 1e-3


def test_each_training_chooses_on_held_out_images_and_never_on_the_test_set() -> None:
    """A setting that learns nothing loses, although the test labels are reversed so that it would win there."""
    reversed_test = TEST.replace(labels=1 - TEST.labels)
    search = [{"lr": 1e-7}, {"lr": 0.05}]
    found = scores(
        REAL[:40], reversed_test, network, real=REAL, protocol=PROTOCOL, search=search, num_networks=1, progress=False
    )
    assert set(found.settings) == set(found.rows)
    assert {tuple(one.items()) for one in found.settings.values()} == {(("lr", 0.05),)}
    assert found.rows["real, hard"].mean < 0.4


def test_soft_labels_count_in_the_own_protocol_only() -> None:
    rows = torch.eye(2)[1 - REAL[:40].labels] * 0.98 + 0.01
    wrong = REAL[:40].replace(labels=rows, columns={"class": REAL[:40].labels})
    found = measure(wrong)
    assert found.rows["set"].labels == "one row"
    assert found.rows["set, hard"].labels == "hard"
    assert found.rows["set"].mean < 0.5 < found.rows["set, hard"].mean


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"protocol": replace(PROTOCOL, augment=None)}, "protocol must have an augmentation"),
        ({"search": []}, "search must hold at least one mapping"),
        ({"validation": 1.0}, "validation must be less than 1"),
        ({"weight": 2}, "weight must be a fraction"),
        ({"real": REAL[:1]}, "at least 2 images of each class"),
        ({"whole": 0.9}, "protocol must be a Protocol"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        measure(REAL[:20], **options)
