"""Canary attack on a teacher's labels: law of the planted labels, exact results for models that remember or do not."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
from scipy.stats import binomtest, chisquare
from torch import Tensor, nn

from attacks.membership import CanaryAttack, canary_attack, plant_canaries
from attacks.statistics import Rate
from distillkit import LabeledImages
from tests.refused import refused


def records(count: int = 60, classes: int = 4, seed: int = 0) -> LabeledImages:
    generator = torch.Generator().manual_seed(seed)
    return LabeledImages(
        torch.randn(count, 1, 4, 4, generator=generator), torch.arange(count) % classes, num_classes=classes
    )


SIZES: list[int] = []


class Lookup(nn.Module):
    """A network that returns the label of a training image, and class 0 for any other image."""

    def __init__(self, known: LabeledImages) -> None:
        super().__init__()
        self.known = known

    def forward(self, images: Tensor) -> Tensor:
        SIZES.append(len(images))
        flat = self.known.images.flatten(1)
        equal = (images.reshape(len(images), 1, -1) == flat).all(2)
        rows = nn.functional.one_hot(self.known.labels, self.known.num_classes).float()
        return equal.float() @ rows


def memorize(known: LabeledImages, seed: int) -> nn.Module:
    return Lookup(known)


def test_planted_labels_are_wrong_and_uniform_over_the_other_classes() -> None:
    data = records(4000, 5)
    (planted, chosen), (_, others) = (plant_canaries(data, 3000, seed) for seed in (3, 4))
    assert len(chosen.unique()) == 3000
    assert torch.equal(planted.images, data.images)
    changed = planted.labels != data.labels
    assert torch.equal(changed.nonzero().flatten(), chosen.sort().values)
    assert not any(torch.equal(chosen, other) for other in (chosen.sort().values, others))
    shift = (planted.labels - data.labels)[chosen] % 5
    assert chisquare(torch.bincount(shift, minlength=5)[1:]).pvalue > 1e-3


def test_a_teacher_that_remembers_everything_repeats_every_label_and_the_control_none_but_guesses() -> None:
    found = canary_attack(records(), memorize, canaries=12, generator=1)
    assert found.taught.value == 1.0
    # the other teacher has never seen the image and answers class 0, the planted label of some canaries
    assert found.only_control == 0
    assert found.only_taught == 24 - found.control.hits
    assert found.p_value == pytest.approx(0.5**found.only_taught)


def test_a_student_that_ignores_its_teacher_repeats_equally_many() -> None:
    constant = nn.Linear(16, 4)
    found = canary_attack(
        records(), memorize, lambda teacher, seed: lambda x: constant(x.flatten(1)), canaries=30, generator=2
    )
    assert found.taught == found.control
    assert (found.only_taught, found.only_control) == (0, 0)
    assert found.p_value == 1.0
    # A model that knows the true labels repeats no planted one.
    found = canary_attack(records(), memorize, lambda teacher, seed: Lookup(records()), canaries=7)
    assert found.taught.hits == found.control.hits == 0


@pytest.mark.parametrize(("taught", "control"), [(0, 0), (7, 2), (3, 3), (2, 9)])
def test_p_value_is_the_exact_sign_test(taught: int, control: int) -> None:
    found = CanaryAttack(Rate.of(taught + 3, 20), Rate.of(control + 3, 20), taught, control)
    expected = binomtest(taught, taught + control, 0.5, "greater").pvalue if taught + control else 1.0
    assert found.p_value == pytest.approx(expected)
    assert str(found) == (
        f"planted labels repeated: {found.taught} if the teacher saw the canary, {found.control} if it did not; "
        f"p = {expected:.2g}"
    )


def test_every_canary_is_tested_on_both_teachers_which_have_disjoint_halves_and_own_seeds() -> None:
    seen, seeds, data = list[LabeledImages](), list[int](), records(61)

    def train(known: LabeledImages, seed: int) -> nn.Module:
        seen.append(known)
        seeds.append(seed)
        return Lookup(known)

    def publish(teacher: nn.Module, seed: int) -> nn.Module:
        seeds.append(seed)
        return teacher

    SIZES.clear()
    found, again, _ = (canary_attack(data, train, publish, canaries=10, generator=g, chunk=4) for g in (4, 4, 5))
    assert SIZES == 3 * ([1, 1] + [4, 4, 2] * 4)  # first to see that each network answers
    first, second = ({tuple(row.tolist()) for row in part.images.flatten(1)} for part in seen[:2])
    assert not first & second
    assert len(first | second) == 61
    assert found.taught.trials == found.control.trials == 20
    assert all(bool((part.labels != 0).any()) for part in seen)
    assert (found, seeds[:4]) == (again, seeds[4:8])
    assert len(set(seeds)) == 8


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"records": records(61), "canaries": 31}, ValueError, "canaries must be at most 30, got 31"),
        ({"publish": nn.Identity()}, TypeError, "publish must be a function that returns a network, got a Identity"),
        ({"train": nn.Identity()}, TypeError, "train must be a function that returns a network, got a Identity itself"),
        ({"train": lambda known: known}, TypeError, r"train is called as train\(records, seed\)"),
        ({"publish": lambda teacher: teacher}, TypeError, r"publish is called as publish\(teacher, seed\)"),
        ({"publish": lambda teacher, seed: lambda x: x}, ValueError, "network must return logits"),
        ({"train": lambda known, seed: None}, TypeError, "the result of train must be .* got NoneType; does it end"),
        ({"train": lambda known, seed: None, "publish": memorize}, TypeError, "the result of train must be"),
        ({"train": lambda known, seed: known.labels.zero_()}, ValueError, "train must not change its records"),
        ({"train": lambda known, seed: known.images.zero_()}, ValueError, "train must not change its records"),
        ({"publish": lambda teacher, seed: None}, TypeError, "the result of publish must be .* got NoneType"),
        ({"publish": lambda teacher, seed: lambda: teacher}, TypeError, "the result of publish is called as"),
        ({"records": records().replace(labels=torch.rand(60, 4))}, TypeError, "records.labels must be class indices"),
        ({"records": records(60, 1)}, ValueError, "at least 2 classes, because a canary needs a wrong label; got 1"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    trained = []
    given: dict[str, Any] = {"records": records(), "train": memorize, "canaries": 5, **change}
    made = given.pop("train")
    counted = made if isinstance(made, nn.Module) else wraps(made)(lambda *own: trained.append(own) or made(*own))
    refused(lambda: canary_attack(given.pop("records"), counted, given.pop("publish", None), **given), error, words)
    assert len(trained) <= 1


@pytest.mark.parametrize("name", ["train", "publish"])
def test_the_second_result_is_checked_like_the_first(name: str) -> None:
    results = [None, memorize(records(), 0)]
    given: dict[str, Any] = {"train": memorize, name: lambda *_: results.pop(), "canaries": 5}
    refused(lambda: plant_canaries(records(), 61), ValueError, "count must be at most 60")
    refused(lambda: canary_attack(records(), **given), TypeError, f"the result of {name} must be .* got NoneType")
