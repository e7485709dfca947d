"""Scores of DD-Ranking on fractions: a golden value, laws, and a measurement on small data."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from distillkit.augment import DSA
from distillkit.evaluate import Evaluation, Row
from distillkit.fingerprint import set_fingerprint
from distillkit.labels import Relabel
from distillkit.rng import as_generator, derive
from distillkit.scores import Scores, _split, augmentation_robust_score, label_robust_score, scores
from distillkit.sets import LabeledImages
from distillkit.sets._class_index import with_class_labels
from distillkit.training import Protocol
from tests.refused import refused


def test_golden_value() -> None:
    """DM on CIFAR-10 with ten images per class."""
    anchors = {"real_hard": 0.848, "data_hard": 0.489, "data_own": 0.489, "random_own": 0.260}
    assert label_robust_score(**anchors) == pytest.approx(0.24216620323586893, abs=1e-15)


def some(count: int, seed: int) -> LabeledImages:
    labels = torch.arange(count) % 2
    images = torch.randn(count, 1, 6, 6, generator=derive(seed)) + 0.3 * (2.0 * labels - 1).view(-1, 1, 1, 1)
    return LabeledImages(images, labels, num_classes=2)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


REAL, TEST = some(200, 0), some(300, 1)
PROTOCOL = Protocol(epochs=4, lr=0.05, batch=16, augment=DSA("flip"))


ACCURACIES = {
    "real, hard": 0.9, "set, hard": 0.5, "set": 0.7, "random": 0.4, "set, no augmentation": 0.65,
    "random, no augmentation": 0.3,
}  # fmt: skip


def rescaled(x: float) -> float:
    return (math.exp(x + 1) - 1) / (math.exp(2) - 1)


@pytest.mark.parametrize(("weight", "augmented"), [(0.2, 0.9), (1.0, 0.0), (0.0, 1.0)])
def test_each_score_has_its_own_weight_and_its_own_accuracies(weight: float, augmented: float) -> None:
    rows = {name: Row("set", "net", (x - 0.1, x + 0.1), 1.0, "hard") for name, x in ACCURACIES.items()}
    rows |= {"set": Row("set", "net", (0.7,), 1.0, "per view"), "random": Row("set", "net", (0.4, 0.4), 1.0)}
    settings: dict[str, dict[str, Any]] = {name: {"lr": i, "batch": 2} for i, name in enumerate(rows)} | {"random": {}}
    found = Scores(rows, settings, weight, augmented)
    assert (found.hlr, found.ior) == (pytest.approx(0.4), pytest.approx(0.3))
    lrs, ars = rescaled(weight * 0.3 - (1 - weight) * 0.4), rescaled(augmented * 0.3 + (1 - augmented) * 0.35)
    assert (found.lrs, found.ars) == (pytest.approx(lrs), pytest.approx(ars))
    told = {name: {"accuracies": list(row.accuracies), "labels": row.labels} for name, row in rows.items()}
    scored = {"hlr": found.hlr, "ior": found.ior, "lrs": found.lrs, "ars": found.ars}
    assert found.record() == {**scored, "rows": told, "settings": settings}
    assert repr(found) == str(found)
    assert str(found).splitlines() == [
        "training                 labels     accuracy %  networks  settings",
        "real, hard               hard      90.0 ± 14.1         2  lr=0, batch=2",
        "set, hard                hard      50.0 ± 14.1         2  lr=1, batch=2",
        "set                      per view         70.0         1  lr=2, batch=2",
        "random                   hard       40.0 ± 0.0         2  –",
        "set, no augmentation     hard      65.0 ± 14.1         2  lr=4, batch=2",
        "random, no augmentation  hard      30.0 ± 14.1         2  lr=5, batch=2",
        f"HLR 40.0 points, IOR +30.0 points, LRS {lrs:.3f}",
        f"ARS {ars:.3f}",
    ]


@pytest.mark.parametrize("whole", [None, replace(PROTOCOL, epochs=9)])
@pytest.mark.parametrize("search", [[{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}], [{"lr": 0.1}, {"lr": 0.2}], [{"lr": 0.2}]])
def test_each_training_gets_its_data_protocol_and_best_setting(
    whole: Protocol | None, search: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All evaluations that `scores` requests, where each kind of training has another best setting."""
    real, soft = some(41, 0), replace(PROTOCOL, relabel=Relabel(network()))  # 21 images of class 0 and 20 of class 1
    real = real.replace(labels=torch.eye(2)[real.labels] * 0.6 + 0.2, columns={"class": 1 - real.labels})
    data, asked = real[:10], list[tuple[Any, ...]]()
    best = {name: i % len(search) for name, i in zip(ACCURACIES, (1, 2, 2, 3, 1, 2))}
    pairs = {("real, hard",): whole or PROTOCOL, ("set, hard",): PROTOCOL, ("set", "random"): soft,
             ("set, no augmentation", "random, no augmentation"): replace(soft, augment=None)}  # fmt: skip

    def call(images: LabeledImages, test: LabeledImages, factory: Any, **options: Any) -> tuple[Any, ...]:
        other, options["generator"] = options.pop("real"), options["generator"].initial_seed()
        prints = [other if one is None else set_fingerprint(one) for one in (images, test, other)]
        return (*prints, factory, sorted(options.items()))

    def fake(images: LabeledImages, *others: Any, **options: Any) -> Evaluation:
        asked.append(call(images, *others, **options))
        protocol, hard = options["protocol"], images.labels.ndim == 1
        names = next(n for n, own in pairs.items() if protocol == replace(own, lr=protocol.lr)
                     and (len(n) == 1) == hard and (n[0] == "real, hard") == (hard and len(images) > 10))  # fmt: skip
        good = [0.9 if search[best[name]]["lr"] == protocol.lr else 0.2 for name in names]
        return Evaluation(tuple(Row("set", "net", (x,), 1.0) for x in good), protocol, len(images))

    monkeypatch.setattr("distillkit.scores.evaluate", fake)
    found = scores(
        data, TEST, network, real=real, protocol=soft, whole=whole, search=search, validation=0.3, num_networks=4,
        weight=0.2, augmented_weight=0.7, chunk=5, generator=3, progress=False,
    )  # fmt: skip
    seed = int(torch.randint(2**62, (), generator=as_generator(3)))
    part, held = _split(real, 0.3, seed)
    wanted = []
    for names, protocol in pairs.items():
        positions = list(dict.fromkeys(best[name] for name in names))
        for final in (False, True):
            images, test = (real, TEST) if final else (part, with_class_labels(held))
            train = {"real, hard": with_class_labels(images), "set, hard": with_class_labels(data)}.get(names[0], data)
            for position in positions if final else range(len(search)) if len(search) > 1 else ():
                wanted.append(call(
                    train, test, network, real=images if len(names) > 1 else None, chunk=5, progress=False,
                    protocol=replace(protocol, **search[position]), num_networks=4 if final else 1,
                    generator=derive(seed, "final" if final else "search"),
                ))  # fmt: skip
    assert sorted(map(repr, asked)) == sorted(map(repr, wanted))
    assert (asked[0][0], asked[-1][2]) == (set_fingerprint(data), None)  # the longest training is the last
    assert found.settings == {name: search[position] for name, position in best.items()}
    assert [*found.rows] == [*found.settings] == [*ACCURACIES]
    assert {name: row.mean for name, row in found.rows.items()} == dict.fromkeys(ACCURACIES, 0.9)
    assert (found.weight, found.augmented_weight) == (0.2, 0.7)


@pytest.mark.parametrize(("share", "counts"), [
    (0.3, [1, 2, 4]), (0.01, [1, 1, 1]), (0.99, [1, 6, 13]), (0.5, [1, 4, 7]), (0.36, [1, 3, 5]),
])  # fmt: skip
def test_held_out_images_are_a_share_of_each_class_and_no_training_image(share: float, counts: list[int]) -> None:
    labels = torch.tensor([0, 1, 2, 2, 1, 2, 0] + [1] * 5 + [2] * 11)
    real = LabeledImages(torch.rand(23, 1, 2, 2), labels, num_classes=3)
    orders = [(real.labels == c).nonzero().flatten() for c in range(3)]
    orders = [own[torch.randperm(len(own), generator=derive(5, c, "held out"))] for c, own in enumerate(orders)]
    first, second = _split(real, share, 5)
    assert torch.equal(second.images, real.images[torch.cat([own[:n] for own, n in zip(orders, counts)])])
    assert torch.equal(first.images, real.images[torch.cat([own[n:] for own, n in zip(orders, counts)])])


@pytest.mark.parametrize(("options", "text"), [
    ({"protocol": replace(PROTOCOL, augment=None)}, "^protocol must have an augmentation"),
    ({"protocol": replace(PROTOCOL, augment=None, relabel=Relabel(network()))}, "^protocol must have an augmentation"),
    ({"whole": "dm"}, "must be a Protocol"),
    ({"protocol": "dm"}, "^protocol must be a Protocol"),
    ({"search": 3}, "^search must be a list of mappings"),
    ({"real": 3}, "^real must be"),
    ({"search": []}, "search must hold at least one mapping"),
    ({"search": [{}, 3]}, r"^search\[1\] must map"),
    ({"search": [{"lr": 0.1}, {"learning_rate": 1}]}, "^search"),
    ({"search": [{"relabel": None}]}, "^search"),
    ({"search": [{}, {"augment": None}]}, "^search"),
    ({"search": [{"lr": 0.1}, {"lr": -1.0}]}, "^lr must be"),
    ({"validation": 1.0}, "validation must be less than 1"),
    ({"validation": 0.0}, "validation must be greater than 0"),
    ({"weight": 2}, "^weight must be a fraction"),
    ({"augmented_weight": -0.1}, "^augmented_weight must be a fraction"),
    ({"real": REAL[[*range(0, 200, 2), 1]]}, "'NoneType' object is not callable"),  # accepted, as no image is held out
    ({"real": REAL[[0, 2, 4, 1]], "search": [{}, {"lr": 0.1}]}, "at least 2 images of each .* got 1 of class 1$"),
    ({"real": REAL[:20]}, "all of its images are in data"),
    ({"real": REAL[30:40]}, r"real must be the real training images, at least as many as data has \(20\)"),
])  # fmt: skip
def test_wrong_arguments_are_named_before_the_first_training(
    options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distillkit.scores.evaluate", None)
    how: dict[str, Any] = {"real": REAL, "protocol": PROTOCOL, "progress": False, **options}
    refused(lambda: scores(REAL[:20], TEST, network, **how), (TypeError, ValueError), text)


@pytest.mark.parametrize("function", [label_robust_score, augmentation_robust_score])
def test_per_cent_are_refused(function: Any) -> None:
    names = [*inspect.signature(function).parameters]
    for name in names:
        refused(lambda n=name: function(**{**dict.fromkeys(names, 0.5), n: "0.5"}), TypeError, f"^{name} must be")
        for wrong in (48.9, 1.001, -0.001):
            text = f"^{name} must be a fraction in .0, 1., got {wrong}; divide per cent by 100"
            refused(lambda n=name, x=wrong: function(**{**dict.fromkeys(names, 0.5), n: x}), ValueError, text)
