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
from distillkit.evaluate import Evaluation, Row
from distillkit.labels import Relabel
from distillkit.rng import derive
from distillkit.scores import Scores, _split, augmentation_robust_score, label_robust_score, scores
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


ACCURACIES = {
    "real, hard": 0.9, "set, hard": 0.5, "set": 0.7, "random": 0.4, "set, no augmentation": 0.65,
    "random, no augmentation": 0.3,
}  # fmt: skip


def rescaled(x: float) -> float:
    return (math.exp(x) - math.exp(-1)) / (math.e - math.exp(-1))


@pytest.mark.parametrize(("weight", "augmented"), [(0.2, 0.9), (1.0, 0.0), (0.0, 1.0)])
def test_each_score_has_its_own_weight_and_its_own_accuracies(weight: float, augmented: float) -> None:
    rows = {name: Row("set", "net", (x - 0.1, x + 0.1), 1.0) for name, x in ACCURACIES.items()}
    settings = {name: {"lr": i} for i, name in enumerate(rows)}
    found = Scores(rows, settings, weight, augmented)
    assert (found.hlr, found.ior) == (pytest.approx(0.4), pytest.approx(0.3))
    lrs, ars = rescaled(weight * 0.3 - (1 - weight) * 0.4), rescaled(augmented * 0.3 + (1 - augmented) * 0.35)
    assert (found.lrs, found.ars) == (pytest.approx(lrs), pytest.approx(ars))
    record = found.record()
    assert record["settings"] == settings
    assert [record[name] for name in ("hlr", "ior", "lrs", "ars")] == [found.hlr, found.ior, found.lrs, found.ars]
    assert record["rows"]["random"] == {"accuracies": list(rows["random"].accuracies), "labels": "hard"}
    shown = str(found).splitlines()
    assert shown[2].split() == ["set,", "hard", "hard", "50.0", "±", "14.1", "2", "lr=1"]
    assert shown[-2:] == [f"HLR 40.0 points, IOR +30.0 points, LRS {lrs:.3f}", f"ARS {ars:.3f}"]


def test_each_training_gets_its_data_protocol_and_best_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluations that `scores` requests; each kind of training has another best setting."""
    real = some(41, 0)  # class 0 has 21 images and class 1 has 20
    soft = replace(PROTOCOL, relabel=Relabel(network()))
    whole, data = replace(PROTOCOL, epochs=9), real[:10].replace(labels=torch.eye(2)[real.labels[:10]] * 0.8 + 0.1)
    asked: list[tuple[Any, ...]] = []

    def fake(images: LabeledImages, test: LabeledImages, factory: Any, **options: Any) -> Evaluation:
        own, other, protocol = len(images), options["real"], options["protocol"]
        asked.append((own, images.labels.ndim, len(test), None if other is None else len(other), protocol,
                      options["num_networks"], options["generator"].initial_seed()))  # fmt: skip
        best = {(True, True): 2, (True, False): 1, (False, True): 0, (False, False): 2}
        key = (protocol.augment is not None, protocol.relabel is not None)
        lrs = [0.1, 0.2, 0.3]
        good = 0.9 if lrs.index(protocol.lr) == best[key] else 0.2
        against = 0.9 if lrs.index(protocol.lr) == (best[key] + 1) % 3 else 0.2
        rows = [Row("set", "net", (good,), 1.0), Row("random real", "net", (against,), 1.0)]
        return Evaluation(tuple(rows[: 1 if other is None else 2]), protocol, own)

    monkeypatch.setattr("distillkit.scores.evaluate", fake)
    search = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}]
    found = scores(
        data, TEST, network, real=real, protocol=soft, whole=whole, search=search, validation=0.3, num_networks=4,
        weight=0.2, augmented_weight=0.7, progress=False,
    )  # fmt: skip
    chosen = {name: dict(one)["lr"] for name, one in found.settings.items()}
    assert chosen == {
        "real, hard": 0.2, "set, hard": 0.2, "set": 0.3, "random": 0.1,
        "set, no augmentation": 0.1, "random, no augmentation": 0.2,
    }  # fmt: skip
    assert all(row.mean == 0.9 for row in found.rows.values())
    assert (found.weight, found.augmented_weight) == (0.2, 0.7)
    searches, finals = [a for a in asked if a[5] == 1], [a for a in asked if a[5] == 4]
    assert len(searches) == 4 * 3
    held = round(0.3 * 21) + round(0.3 * 20)  # of each class
    assert {a[2] for a in searches} == {held}
    assert {a[2] for a in finals} == {len(TEST)}
    assert {(a[0], a[3]) for a in searches} == {(41 - held, None), (10, None), (10, 41 - held)}
    assert {(a[0], a[3]) for a in finals} == {(41, None), (10, None), (10, 41)}
    assert len({a[6] for a in searches}) == len({a[6] for a in finals}) == 1
    assert searches[0][6] != finals[0][6]
    for rows, labels, _, other, protocol, *_ in asked:
        if rows != 10:
            assert (protocol.epochs, protocol.relabel) == (9, None)
        elif other is None:
            assert (labels, protocol.epochs, protocol.relabel, protocol.augment) == (1, 4, None, PROTOCOL.augment)
        else:
            assert (labels, protocol.epochs, protocol.relabel is soft.relabel) == (2, 4, True)
    assert {a[4].augment for a in asked if a[3] is not None} == {PROTOCOL.augment, None}
    asked.clear()
    scores(data, TEST, network, real=real, protocol=soft, search=search[:1], progress=False)
    assert [a[4] for a in asked if a[0] == 41] == [replace(PROTOCOL, lr=0.1)]  # by default, the same with hard labels


def test_equal_seeds_give_equal_results() -> None:
    found = measure(REAL[:20])
    assert found.record() == measure(REAL[:20]).record()
    assert found.record() != measure(REAL[:20], generator=1).record()
    assert found.rows["set, hard"].accuracies != found.rows["set, no augmentation"].accuracies


def test_held_out_images_are_a_share_of_each_class_and_no_training_image() -> None:
    images = torch.arange(23.0).view(-1, 1, 1, 1).expand(-1, 1, 2, 2) / 2
    real = LabeledImages(images, torch.tensor([0] * 2 + [1] * 7 + [2] * 14), num_classes=3)
    for share, counts in ((0.3, [1, 2, 4]), (0.01, [1, 1, 1]), (0.99, [1, 6, 13]), (0.5, [1, 4, 7])):
        first, second = _split(real, share, 5)
        assert second.counts().tolist() == counts
        both = 2 * torch.cat([first.images, second.images])[:, 0, 0, 0]
        assert both.sort().values.tolist() == list(range(23))
    orders = [(2 * _split(real, 0.5, seed)[1].images[:, 0, 0, 0]).tolist() for seed in range(30)]
    assert len(set(map(tuple, orders))) > 25  # and not the same places in every class:
    assert any(
        {int(x) - 2 for x in order if 2 <= x < 9} != {int(x) - 9 for x in order if 9 <= x < 16} for order in orders
    )


def test_each_class_draws_its_own_held_out_images() -> None:
    labels = torch.arange(120) % 3
    data = LabeledImages(torch.arange(120.0).view(-1, 1, 1, 1) / 120, labels, num_classes=3)

    def places(seed: int) -> list[list[int]]:
        held = (_split(data, 0.25, seed)[1].images.flatten() * 120).round().long()
        return [sorted((held[held % 3 == c] // 3).tolist()) for c in range(3)]

    one, two, three = places(1)
    assert len({tuple(one), tuple(two), tuple(three)}) == 3
    assert [one, two, three] == places(1) != places(2)


def test_random_images_gain_nothing_over_random_images() -> None:
    """The mean of IOR over five random sets is within three standard errors of 0."""
    gains = torch.tensor([measure(REAL[20 * i : 20 * i + 20], generator=i).ior for i in range(5)])
    assert abs(gains.mean()) < 3 * gains.std() / math.sqrt(5) + 1e-3


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


@pytest.mark.parametrize(
    "search", [[{"learning_rate": 1}], [{"relabel": None}], [{"lr": -1.0}], [3], [{"lr": 0.1}, {3: 1}]]
)
def test_wrong_settings_to_search_are_named_before_the_start(search: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"search|lr must be"):
        scores(REAL[:40], TEST, network, real=REAL, protocol=PROTOCOL, search=search, progress=False)


def test_soft_labels_count_in_the_own_protocol_only() -> None:
    rows = torch.eye(2)[1 - REAL[:40].labels] * 0.98 + 0.01
    wrong = REAL[:40].replace(labels=rows, columns={"class": REAL[:40].labels})
    pool = REAL.replace(labels=torch.eye(2)[REAL.labels], columns={"class": REAL.labels})
    found = measure(wrong, real=pool)
    assert found.rows["set"].labels == found.rows["random"].labels == "one row"
    assert found.rows["real, hard"].labels == "hard"
    assert found.rows["set, hard"].labels == "hard"
    assert found.rows["set"].mean < 0.5 < found.rows["set, hard"].mean


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"protocol": replace(PROTOCOL, augment=None)}, "protocol must have an augmentation"),
        ({"search": []}, "search must hold at least one mapping"),
        ({"search": [{}, 3]}, r"^search\[1\] must map"),
        ({"validation": 1.0}, "validation must be less than 1"),
        ({"weight": 2}, "weight must be a fraction"),
        ({"real": REAL[:1]}, "at least 2 images of each class"),
        ({"real": REAL[:20]}, "all of its images are in data"),
        ({"real": REAL[30:40]}, r"real must be the real training images, at least as many as data has \(20\)"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        measure(REAL[:20], **options)
