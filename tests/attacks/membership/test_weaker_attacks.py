"""The gradient's norm, the shadow classifier, FedLGD's density test: against plain loops, SciPy and scikit-learn."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import gaussian_kde
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from attacks import roc
from attacks.membership import gradient_kde, gradient_norm, shadow_classifier
from distillkit.networks import ConvNet, build
from distillkit.rng import derive
from tests.refused import refused

IMAGES, LABELS = torch.randn(7, 1, 8, 8, generator=derive(0)), torch.arange(7) % 3
LARGE = IMAGES * torch.where(LABELS == 1, 1e30, 1.0)[:, None, None, None]


class Branching(nn.Module):
    """Network with a branch on values, which vmap does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.linear(x.flatten(1))
        return z if float(x.sum()) > 0 else 2 * z


class Root(nn.Module):
    """Square root of a weight that is 0, where its slope is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sqrt()


def by_hand(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    network.eval()
    found = []
    for x, y in zip(images, labels):
        value = nn.functional.cross_entropy(network(x[None]), y[None])
        grads = torch.autograd.grad(value, list(network.parameters()), allow_unused=True)
        found.append(float(sum(g.double().square().sum() for g in grads if g is not None)) ** 0.5)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("norm", ["batch", "instance", "none"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_gradient_norm_is_that_of_each_record_alone(norm: str, chunk: int | None) -> None:
    network = build(lambda: ConvNet((1, 8, 8), 3, width=4, depth=1, norm=norm), 0).train()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    found = gradient_norm(network, IMAGES, LABELS, chunk=chunk)
    assert network.training
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    torch.testing.assert_close(-found, by_hand(network, IMAGES, LABELS), rtol=1e-4, atol=0)


def test_gradients_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    network, sizes, module = build(Branching, 0), list[int](), sys.modules["attacks.membership.gradients"]
    norms = module._norms
    monkeypatch.setattr(module, "_norms", lambda *own: sizes.append(len(own[2])) or norms(*own))
    images = torch.randn(300, 1, 8, 8, generator=derive(1))
    whole = gradient_norm(network, images, torch.arange(300) % 3)
    assert sizes == [256, 44]
    for numbers, wanted in ((195 * 3, [3, 3, 1]), (194, [1] * 7)):  # the network has 195 parameters
        sizes.clear()
        monkeypatch.setattr(module, "_NUMBERS", numbers)
        assert gradient_norm(network, images[:7], torch.arange(7) % 3).tolist() == pytest.approx(whole[:7].tolist())
        assert sizes == wanted


def test_network_that_cannot_be_batched_runs_record_by_record() -> None:
    network = build(Branching, 0)
    found = gradient_norm(network, IMAGES, LABELS)
    torch.testing.assert_close(-found, by_hand(network, IMAGES, LABELS), rtol=1e-5, atol=0)
    frozen = build(Branching, 0).requires_grad_(False)
    assert torch.equal(gradient_norm(frozen, IMAGES, LABELS), found)


def test_scalar_parameters_are_supported() -> None:
    network = nn.Sequential(nn.Flatten(), Root(), nn.Linear(64, 3, bias=False))
    with torch.no_grad():
        network[1].weight.fill_(0.25)
        network[2].weight.copy_(torch.randn(3, 64, generator=derive(1)))
    for images in (IMAGES, 1e25 * IMAGES):
        found = gradient_norm(network, images, LABELS)
        torch.testing.assert_close(-found, by_hand(network, images, LABELS), rtol=1e-5, atol=0)


# The shadow classifier.


def outputs(seed: int, effect: float, shadows: int = 9, records: int = 60, d: int = 4) -> dict[str, Tensor]:
    g = derive(seed)
    inside = torch.rand(shadows, records, generator=g) < 0.5
    scores = torch.randn(shadows, records, d, generator=g, dtype=torch.float64) + effect * inside[:, :, None]
    labels = 3 * (torch.arange(records) % 2)
    scores[:, labels == 3] *= -1  # what speaks for members in one class speaks against them in the other
    scores[..., 0] *= 1e-6
    scores[..., d - 1] = 0.25  # which tells nothing
    return {"inside": inside[1:], "shadows": scores[1:], "target": scores[0], "labels": labels, "truth": inside[0]}


def test_shadow_classifier_is_a_logistic_regression_for_each_class() -> None:
    case = outputs(2, 1.0)
    truth = case.pop("truth")
    found = shadow_classifier(**case)
    for label in (0, 3):
        own = (case["labels"] == label).numpy()
        x = case["shadows"].numpy()[:, own].reshape(-1, 4)
        scale, shift = np.array([*x.std(0)[:3], 1.0]), x.mean(0)
        model = LogisticRegression(max_iter=1000).fit((x - shift) / scale, case["inside"].numpy()[:, own].reshape(-1))
        wanted = model.decision_function((case["target"].numpy()[own] - shift) / scale)
        assert np.allclose(found.numpy()[own], wanted)
    assert roc(found, truth).auc > 0.8
    del case["labels"]
    assert roc(shadow_classifier(**case), truth).auc < roc(found, truth).auc - 0.1  # one for all classes fails
    one, several = ((case["target"][:, own], case["inside"], case["shadows"][:, :, own]) for own in (0, slice(1)))
    assert torch.equal(shadow_classifier(*one), shadow_classifier(*several))


# FedLGD's test.


def test_densities_are_cross_fitted() -> None:
    """A moved record changes no density of its own fold; SciPy gives its score with the other folds."""
    values, member = torch.randn(24, 2, generator=derive(5)), torch.arange(24) % 2 == 0
    scores = gradient_kde(values, member, folds=6)
    assert not torch.equal(gradient_kde(values, member, folds=6, seed=1), scores)
    assert torch.equal(gradient_kde(values[:, 0], member), gradient_kde(values[:, :1], member))
    for i in (0, 7, 12):
        moved = values.clone()
        moved[i] += 1
        fold = (gradient_kde(moved, member, folds=6) == scores) | (torch.arange(24) == i)
        assert (int(fold.sum()), int((fold & member).sum())) == (4, 2)
        logs = [gaussian_kde(values[side & ~fold].numpy().T).logpdf(values[i].numpy())[0] for side in (member, ~member)]
        assert float(scores[i]) == pytest.approx(logs[0] - logs[1])


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: gradient_norm(nn.Flatten(), IMAGES, LABELS), "network must have parameters"),
    (lambda: gradient_norm(nn.LazyLinear(3), IMAGES, LABELS), "network must be one whose shapes are known, but weight"),
    (lambda: gradient_norm(build(Branching, 0), IMAGES, LABELS[:3]), "labels must have one entry .* got 3 for 7"),
    (lambda: gradient_norm(build(Branching, 0), IMAGES, LABELS, chunk=0), "chunk must be at least 1, got 0"),
    (lambda: gradient_norm(build(Branching, 0), IMAGES, LABELS + 1), "labels must be below num_classes=3, got 3"),
    *((lambda net=net: gradient_norm(nn.Sequential(nn.Conv2d(1, 2, 1), net), IMAGES, LABELS), rf"must give .*{got}")
        for net, got in ((nn.ReLU(), r"got \[1, 2, 8, 8\]"), (nn.MaxPool2d(8, return_indices=True), r"got \[\]"))),
    (lambda: gradient_norm(nn.Sequential(nn.Flatten(), Root(), nn.Linear(64, 3)), IMAGES[:4], LABELS[:4]),
        "network must have finite gradients, but those of 4 records are not"),
    (lambda: gradient_norm(nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.LPPool1d(2, 1)), LARGE, LABELS),
        "but those of 2 records are not"),
    (lambda: gradient_norm(LABELS, IMAGES, LABELS), "network must be an nn.Module"),
    *((lambda t=t, s=s: shadow_classifier(torch.zeros(t), torch.ones(2, 3).bool(), torch.zeros(s)),
        f"S, n, d], got {re.escape(f'{t} and {s}')}") for t, s in (([3], [2, 3, 2]), ([3, 2], [2, 3]))),
    (lambda: shadow_classifier(torch.zeros(0), torch.ones(2, 0).bool(), torch.zeros(2, 0)), r"got \[0\] and \[2, 0\]"),
    *((lambda s=s, n=n: shadow_classifier(torch.zeros(3), torch.ones(s, n).bool(), torch.zeros(2, 3)),
        rf"one row of target's \[3\] per shadow, got \[{s}, {n}\] and \[2, 3\]") for s, n in ((2, 4), (3, 3))),
    (lambda: shadow_classifier(torch.zeros(3, 2), torch.ones(2, 3).bool(), torch.zeros(2, 3, 4)),
        r"one row of target's \[3, 2\] per shadow, got \[2, 3\] and \[2, 3, 4\]"),
    (lambda: shadow_classifier(torch.zeros(3), torch.ones(2, 3).bool(), torch.zeros(2, 3)),
        "on every record of class 0"),
    (lambda: shadow_classifier(torch.zeros(3), torch.zeros(2, 3).bool(), torch.zeros(2, 3)), "trained on no record"),
    (lambda: gradient_kde(torch.zeros(4, 0), torch.ones(4).bool()), r"\[n, d\], got \[4, 0\]"),
    (lambda: gradient_kde(torch.zeros(4, 2, 2), torch.ones(4).bool()), r"\[n, d\], got \[4, 2, 2\]"),
    (lambda: gradient_kde(torch.zeros(20), torch.arange(20) < 10, seed=-1), "seed must be at least 0, got -1"),
    (lambda: gradient_kde(torch.zeros(9), torch.arange(9) < 4, folds=1), "folds must be at least 2"),
    (lambda: gradient_kde(torch.zeros(4), torch.ones(4)), "member must be a bool tensor"),
    (lambda: gradient_kde(torch.zeros(4), torch.ones(4, 1).bool()), r"one row per record, got \[4\] and \[4, 1\]"),
    *((lambda side=side: gradient_kde(torch.zeros(20), side), "at least 10 of each for 5 folds, but one side has 9")
        for side in (torch.arange(20) < 9, torch.arange(20) > 8)),
    (lambda: gradient_kde(torch.zeros(40), torch.arange(40) < 20),
        "statistic must vary independently in each of its 1 columns"),
    (lambda: gradient_kde(torch.randn(24, 30), torch.arange(24) < 12, folds=2),
        "with more rows than columns in every fold"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), REFUSALS, ids=range(len(REFUSALS)))
def test_invalid_arguments_are_named(call: Callable[[], object], said: str) -> None:
    refused(call, (TypeError, ValueError), said)
