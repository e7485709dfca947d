"""LiRA, RMIA and `nearest` against their papers' formulas, record by record with NumPy and SciPy."""

from __future__ import annotations

import math
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from attacks import align, match, roc
from attacks.audit import one_run_lower_bound
from attacks.inversion import class_counts, invert_linear
from attacks.membership import (
    VARIANCES,
    Pipeline,
    label_only,
    lira,
    loss,
    margin,
    nearest,
    rmia,
    run_shadows,
    shadow_classifier,
    stable_logit,
)  # fmt: skip
from attacks.membership.lira import Variance
from distillkit.rng import derive
from tests.attacks.membership.importable_fit import IMAGES, fit
from tests.fl.emulated_device import DEVICE, on_second_device, second_device
from tests.refused import refused


def shadows_of(seed: int, records: int = 30, count: int = 12, effect: float = 1.0) -> dict[str, torch.Tensor]:
    """Return scores with a mean and a spread for each record; scores of models trained on it are higher."""
    g = derive(seed)
    order = torch.rand(count + 1, records, generator=g)
    inside = order < order.median(0).values
    means, spreads = torch.randn(records, generator=g), 0.5 + torch.rand(records, generator=g)
    scores = means + spreads * torch.randn(count + 1, records, generator=g) + effect * inside
    z = torch.randn(count + 1, 40, generator=g)
    return {
        "member": inside[0], "target": scores[0].double(), "inside": inside[1:], "shadows": scores[1:].double(),
        "z_target": z[0].double(), "z_shadows": z[1:].double(),
    }  # fmt: skip


def of_lira(s: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return s["target"], s["inside"], s["shadows"]


# Scores.


@given(st.integers(2, 6), st.integers(0, 10_000))
def test_scores_equal_their_formulas(classes: int, seed: int) -> None:
    logits = (3 * torch.randn(5, classes, generator=derive(seed), dtype=torch.float64)).requires_grad_()
    labels = torch.randint(classes, (5,), generator=derive(seed, 1))
    p = logits.softmax(1)[torch.arange(5), labels]
    assert not any(score(logits, labels).requires_grad for score in (loss, margin, stable_logit))
    assert torch.allclose(loss(logits, labels), p.log())
    assert torch.allclose(stable_logit(logits, labels), (p / (1 - p)).log())
    rest = [max(v for j, v in enumerate(row) if j != y) for row, y in zip(logits.tolist(), labels.tolist())]
    own = logits[torch.arange(5), labels]
    assert torch.allclose(margin(logits, labels), own - torch.tensor(rest, dtype=torch.float64))
    assert torch.allclose(-torch.nn.functional.softplus(-stable_logit(logits, labels)), loss(logits, labels))


def test_confident_records_do_not_tie() -> None:
    """In float32 both have p = 1; their stable logits differ by 5, like their logits."""
    logits = torch.tensor([[60.0, 0.0], [65.0, 0.0]])
    found = stable_logit(logits, torch.tensor([0, 0]))
    assert (found.tolist(), found.dtype) == ([60.0, 65.0], torch.float64)
    assert logits.softmax(1)[:, 0].tolist() == [1.0, 1.0]
    with pytest.warns(UserWarning, match="the network of `logits` must return logits"):
        stable_logit(logits.softmax(1), torch.tensor([0, 0]))


# LiRA.


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("variance", ["example", "pooled", "fixed"])
def test_lira_is_the_tail_or_the_ratio_of_the_paper(variance: Variance, online: bool) -> None:
    """Offline, 1 - Pr[Z > score] with Z Gaussian as fitted to models without the record, as log odds; online, algorithm
    1. The authors' code estimates the fixed variance: that of all scores with a record, or without it."""
    s = shadows_of(1)
    s["target"][:2] = torch.tensor([60.0, -60.0])  # whose p is 1 or 0 in float64
    if variance != "example":
        s["inside"][:, 0] = torch.arange(12) > 0  # one without the first record is enough

    def fitted(chosen: torch.Tensor) -> tuple[Any, Any]:
        columns = [s["shadows"][:, i][chosen[:, i]].numpy() for i in range(30)]
        squares, freedom = sum(((c - c.mean()) ** 2).sum() for c in columns), sum(len(c) - 1 for c in columns)
        pooled, fixed = math.sqrt(squares / freedom), s["shadows"][chosen].numpy().std()
        spread = (
            [c.std(ddof=1) for c in columns] if variance == "example" else pooled if variance == "pooled" else fixed
        )
        return [c.mean() for c in columns], spread

    x, without = s["target"].numpy(), fitted(~s["inside"])
    wanted = norm.logcdf(x, *without) - norm.logsf(x, *without)
    if online:
        wanted = norm.logpdf(x, *fitted(s["inside"])) - norm.logpdf(x, *without)
    given_ = (one.requires_grad_() if one.is_floating_point() else one for one in of_lira(s))
    assert lira(*given_, online=online, variance=variance).numpy() == pytest.approx(wanted, rel=1e-9)


def test_scores_without_spread_are_refused_for_every_variance() -> None:
    inside = torch.arange(4)[:, None].expand(4, 3) < 2
    noise = torch.randn(4, 3, generator=derive(0))
    for variance, (side, shadows) in product(VARIANCES, {"out": torch.ones(4, 3), "": noise.where(~inside, 1)}.items()):
        with pytest.raises(ValueError, match=f"with{side} a record must not all give the same score, as .* 3 records"):
            lira(torch.zeros(3), inside, shadows, variance=variance, online=True)


# RMIA.


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(("gamma", "a"), [(0.5, 0.3), (1.0, 0.0), (2.0, 1.0)])
def test_rmia_counts_the_population_records_that_it_beats(online: bool, gamma: float, a: float) -> None:
    """Records that beat equally many are ordered by their own ratios."""
    s = shadows_of(8, records=200)
    s["z_target"], s["z_shadows"] = s["z_target"][:4], s["z_shadows"][:, :4]
    found = rmia(**{k: v for k, v in s.items() if k != "member"}, online=online, a=a, gamma=gamma)
    ranks = []
    p = {k: 1 / (1 + np.exp(-s[k].numpy())) for k in ("target", "shadows", "z_target", "z_shadows")}
    for i in range(200):
        without = p["shadows"][~s["inside"][:, i].numpy(), i].mean()
        usual = ((1 + a) * without + 1 - a) / 2
        z_usual = ((1 + a) * p["z_shadows"].mean(0) + 1 - a) / 2
        if online:
            usual = (p["shadows"][s["inside"][:, i].numpy(), i].mean() + without) / 2
            z_usual = p["z_shadows"].mean(0)
        ratios = (p["target"][i] / usual) / (p["z_target"] / z_usual)
        ranks.append(((ratios >= gamma).mean(), p["target"][i] / usual))
        assert float(found[i]) == pytest.approx(ranks[-1][0], abs=1e-6 / 4)
    assert found.argsort().tolist() == sorted(range(200), key=ranks.__getitem__)
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


def test_rmia_counts_a_tie_as_beaten() -> None:
    """The ratio is at least gamma, not above it; records with the population's scores beat the whole population."""
    even = {"target": torch.zeros(2), "shadows": torch.zeros(3, 2), "inside": torch.zeros(3, 2, dtype=torch.bool)}
    found = rmia(**even, z_target=torch.tensor([0.0, 0.0, 1.0]), z_shadows=torch.zeros(3, 3))
    assert found.tolist() == pytest.approx([2 / 3, 2 / 3])


# The set itself.


@given(st.integers(0, 1000), st.booleans(), st.sampled_from([0.0, 1e6]))
def test_nearest_equals_the_ratio_of_plain_distances(seed: int, classes: bool, offset: float) -> None:
    g = derive(seed)
    images, records = (offset + torch.rand(n, 1, 2, 2, generator=g).double() for n in (12, 9))
    if offset:  # three images are near each record, which inner products cannot tell apart
        images[4:8], images[8:] = (images[:4] + 1e-3 * torch.rand(4, 1, 2, 2, generator=g) for _ in range(2))
    records[:6] = images[:6] + 1e-9 * torch.rand(6, 1, 2, 2, generator=g)
    labels, own = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 1]), torch.arange(9) % 3  # two of the last class
    distances = (records[:, None] - images).flatten(2).norm(dim=2)
    if classes:
        distances[own[:, None] != labels] = torch.inf
    first, second = distances.sort(1).values[:, :2].unbind(1)
    again = torch.cat([torch.arange(12), torch.randint(12, (20,), generator=g)])  # repeated images count once
    given_ = images[again].requires_grad_(), records.requires_grad_()
    found = nearest(*given_, *((labels[again], own) if classes else ()))
    assert not found.requires_grad
    assert torch.allclose(found, 1 - first / second, rtol=0, atol=1e-12)


def test_classes_are_ignored_if_one_has_a_single_image() -> None:
    g = derive(12)
    images, records = torch.rand(6, 1, 3, 3, generator=g), torch.rand(9, 1, 3, 3, generator=g)
    own = torch.arange(9) % 3
    plain = nearest(images, records)
    for labels in (torch.arange(6), torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 1])):
        assert torch.equal(nearest(images, records, labels, own), plain)
    assert not torch.equal(nearest(images, records, torch.arange(6) % 3, own), plain)
    labels, again = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 3, 4, 4])  # class 2 has one image, twice
    assert torch.equal(nearest(images[again], records, labels, own), nearest(images[again], records))
    gaps = (records[:, None] - images[:2]).flatten(2).norm(dim=2).sort(1).values
    torch.testing.assert_close(nearest(images[:2], records).float(), 1 - gaps[:, 0] / gaps[:, 1])
    others = nearest(images[again], records, labels, own % 2)  # which no record has
    assert torch.equal(others, nearest(images[:4], records, labels[:4], own % 2))


@pytest.mark.parametrize("classes", [False, True])
def test_candidates_are_compared_in_chunks(classes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    g = derive(11)
    images, records = torch.rand(7, 1, 3, 3, generator=g), torch.rand(2500, 1, 3, 3, generator=g)
    labels, own = torch.arange(7) % 2, torch.randint(2, (2500,), generator=g)
    whole = nearest(images, records, *((labels, own) if classes else ()))
    part = slice(2100, 2200)
    for values in (1 << 24, 30, 5):  # an image has 9
        monkeypatch.setattr(sys.modules["attacks.membership.nearest"], "_VALUES", values)
        assert torch.equal(whole[part], nearest(images, records[part], *((labels, own[part]) if classes else ())))


def test_results_are_on_the_device_of_the_first_argument() -> None:
    s, x, y = shadows_of(8), torch.rand(9, 1, 2, 2, generator=derive(0)), torch.arange(9) % 3
    target, *others = (value for name, value in s.items() if name != "member")
    for call in (
        lambda first: lira(first(target), *others[:2]),
        lambda first: rmia(first(target), *others),
        lambda first: nearest(first(x), x[:4] / 2, y, y[:4]),
        lambda first: margin(first(x.flatten(1)), y),
        lambda first: invert_linear(first(x.flatten(1)), target[:9]).input,
        lambda first: class_counts(first(target[:4] - target[:4].mean()) / 9, 3, x.flatten(1).softmax(1)),
        lambda first: align(first(x), x.flip(0)),
        lambda first: match(first(x), x.flip(0)),
        lambda first: shadow_classifier(first(target), *others[:2], torch.arange(30) % 2),
        lambda first: label_only(lambda images: images.flatten(1).to("cpu"), first(x), y, shift=1, noise=()),
    ):
        with second_device():
            found = call(lambda one: one.to(DEVICE))
            assert on_second_device(found)
            assert torch.equal(found.to("cpu"), call(lambda one: one))
    for plain in (
        lambda first: roc(first(target), others[0][0]).hits,
        lambda first: one_run_lower_bound(first(target), others[0][0], 30, 0.0, confidence=0.1),
        lambda first: run_shadows(Pipeline(fit, first(IMAGES), first(torch.arange(20))), 4, progress=False).labels,
    ):
        with second_device():
            found = torch.as_tensor(plain(lambda one: one.to(DEVICE)))
            assert not on_second_device(found)
        assert torch.equal(found, torch.as_tensor(plain(lambda one: one)))


# Refusals.


def refusals() -> list[tuple[Any, str]]:
    s = shadows_of(12)
    target, inside, shadows = of_lira(s)
    all_in, one_out = torch.ones_like(inside), inside.clone()
    one_out[:, 0] = torch.arange(12) > 0
    flat = shadows.where(torch.arange(30) > 0, 1.0)
    z = {"z_target": s["z_target"], "z_shadows": s["z_shadows"]}
    one, three = torch.rand(1, 1, 2, 2), torch.rand(3, 1, 2, 2)
    return [
        *((lambda given=given: lira(*given[:-1], **given[-1]), words) for *given, words in (
            (target, inside, shadows, {"variance": "global"}, "one of 'pooled', 'fixed', 'example', got"),
            (target, inside, shadows, {"online": 1}, "online must be True or False, got 1"),
            (target[:5], inside, shadows, {}, r"inside and shadows \[S, n\], got \[5\], \[12, 30\] and \[12, 30\]"),
            (target, inside[:, :5], shadows, {}, r"target must be \[n\], .*, got \[30\], \[12, 5\] and \[12, 30\]"),
            (shadows, inside, shadows, {}, r"target must be \[n\], .* got \[12, 30\], \[12, 30\] and \[12, 30\]"),
            (target, inside.int(), shadows, {}, "inside must be a bool tensor"),
            (target.int(), inside, shadows, {}, "target must be a floating tensor"),
            (target, inside, shadows / 0, {}, "shadows must be finite, but 360 of 360 .*, use stable_logit"),
            (target, all_in, shadows, {}, r"least 1 trained without every record \(and 2 for some\), but 30 records"),
            (target, all_in[:3] & (torch.arange(3) > 0)[:, None], shadows[:3], {}, r"\(and 2 for some\), but 0 rec"),
            (target, ~all_in, shadows, {"online": True}, "trained with every record"),
            (target, one_out, shadows, {"variance": "example"}, "2 trained without every record .*, but 1 records"),
            (target, inside, torch.ones_like(shadows), {}, "not all give the same score, as they do for 30 records"),
            (target, inside, flat, {"variance": "example"}, "the same score, as they do for 1 records"),
        )),
        *((lambda given=given: rmia(*given[:-1], **given[-1]), words) for *given, words in (
            (target, one_out | (torch.arange(30) == 1), shadows, z, "least 1 trained without every record, but 1 rec"),
            (target, ~all_in, shadows, z | {"online": True}, "least 1 trained with every record, but 30 records"),
            *((target, inside, shadows, z | {name: one}, f"^{name} must be .*, got {one:g}$") for name, *wrong in (
                ("a", -0.1, 1.1), ("gamma", 0.0), ("online", 1)) for one in wrong),
            (target, inside, shadows, {"z_target": target[:0], "z_shadows": shadows[:, :0]}, "at least one score"),
            (target, inside, shadows, z | {"z_shadows": z["z_shadows"][:3]}, r"each of 12 .* \[40\] and \[3, 40\]"),
            (target, inside, shadows, z | {"z_target": target}, r"got \[30\] and \[12, 40\]"),
            (target, inside, shadows, z | {"z_target": shadows}, r"got \[12, 30\] and \[12, 40\]"),
            *((target, inside, shadows, z | {name: z[name] / 0}, f"{name} must be finite") for name in z),
        )),
        *((lambda given=given: nearest(*given), words) for *given, words in (
            (one, three, "images must be at least 2 different ones, got 1"), (three, three / 0, "candidates must be"),
            (three, torch.rand(3, 1, 3, 3), r"images' shape, \[1, 2, 2\], got \[1, 3, 3\]"),
            (three, torch.rand(3, 1, 4, 1), r"images' shape, \[1, 2, 2\], got \[1, 4, 1\]"),
            (three, one, torch.tensor([0, 0, 1]), "given together, or neither"),
            (three, one, None, torch.tensor([0]), "given together, or neither"),
            (three, one, torch.tensor([0, 0]), torch.tensor([0]), "labels must have one entry per image: got 2 for 3"),
            (three, one, torch.tensor([0, 0, 0]), torch.tensor([0, 0]), "own must have one entry .* got 2 for 1"),
        )),
        (lambda: stable_logit(torch.zeros(2, 1), torch.tensor([0, 0])), r"at least 2 columns, got \[2, 1\]"),
        (lambda: loss(torch.zeros(2, 3), torch.tensor([0, 3])), "labels must be below num_classes=3, got 3"),
        (lambda: loss(torch.zeros(2, 3), torch.tensor([0])), "labels must have one entry per image: got 1 for 2"),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), refusals(), ids=lambda value: "" if callable(value) else value[:20])
def test_invalid_arguments_are_named(call: Any, said: str) -> None:
    refused(call, (TypeError, ValueError), said)
