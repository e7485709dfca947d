"""Inversion of any message: replayed client training, labels paired with images, and agreement of restarts."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from attacks import match, psnr
from attacks.inversion import ClassMeans, FedAvgUpdate, Gradient, ReplayableMessage, batch_norm_prior, invert_message
from attacks.inversion._search import lbfgs, signed_adam
from attacks.inversion.priors import group_mean
from attacks.inversion.reconstruction import _to_pixels, _variation
from distillkit.losses import BatchNormPrior
from distillkit.networks import ConvNet, build
from distillkit.normalization import IDENTITY, Normalization
from distillkit.rng import derive
from tests.attacks.inversion.images import pictures
from tests.refused import refused

SHAPE = (1, 8, 8)


def network(activation: str = "tanh", norm: str = "none", width: int = 8) -> nn.Module:
    return build(lambda: ConvNet(SHAPE, 5, width=width, depth=1, norm=norm, activation=activation), 0)


def small() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 5))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=derive(0, *p.shape)))
    return net


# Replays.


EPOCHS, BATCH, SEED = st.integers(1, 3), st.sampled_from([None, 1, 2, 3]), st.integers(0, 100)
MOMENTUM = st.sampled_from([0.0, 0.9])


@given(EPOCHS, BATCH, MOMENTUM, st.sampled_from([0.0, 0.1]), SEED)
def test_replay_equals_sgd(epochs: int, batch: int | None, momentum: float, decay: float, seed: int) -> None:
    images, labels = torch.rand(4, *SHAPE, generator=derive(seed)), torch.tensor([0, 1, 1, 4])
    net, trained = small(), small()
    for one in (net, trained):  # a parameter without a gradient, which SGD does not decay
        one[0].register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    order = [r for epoch in range(epochs) for r in torch.randperm(4, generator=derive(seed, epoch)).split(batch or 4)]
    for rows in order:
        optimizer.zero_grad()
        F.cross_entropy(trained(images[rows]), labels[rows]).backward()
        optimizer.step()
    change = [(a - b).detach() for a, b in zip(trained.parameters(), net.parameters())]
    alike = {"lr": 0.1, "momentum": momentum, "weight_decay": decay}
    known = FedAvgUpdate(net, change, order=order, **alike)  # type: ignore[arg-type]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(known.replay(images, labels), change))
    assert known.ordered
    sent = FedAvgUpdate.of(net, images, labels, epochs=epochs, batch=batch, order=order, **alike)  # type: ignore[arg-type]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(sent.observed, change))
    alike |= {"epochs": epochs, "batch": batch, "order": None}  # the attacker does not know the order
    assert vars(sent).items() >= (alike | {"ordered": batch is not None}).items()


@given(st.integers(0, 4), EPOCHS, MOMENTUM, SEED)
def test_label_of_one_image_is_inferred_after_steps(k: int, epochs: int, momentum: float, seed: int) -> None:
    image = torch.rand(1, *SHAPE, generator=derive(seed))
    update = FedAvgUpdate.of(small(), image, torch.tensor([k]), lr=0.1, epochs=epochs, momentum=momentum)
    assert update.read_labels(1, torch.rand(8, *SHAPE, generator=derive(1))).tolist() == [k]


def test_labels_of_a_batch_are_inferred_from_several_steps() -> None:
    """With the mean prediction before and after; with momentum, a step counts several times."""
    images, labels = torch.rand(8, *SHAPE, generator=derive(8)), torch.tensor([2, 2, 2, 2, 2, 4, 4, 4])
    noise, skewed = torch.rand(64, *SHAPE, generator=derive(6)), small()
    skewed[3].bias.data[4] += 2  # type: ignore[index, union-attr, operator]
    assert torch.equal(Gradient.of(skewed, images, labels).read_labels(8, noise), labels)
    one = Gradient.of(skewed, images[:1], labels[:1]).observed
    assert Gradient(skewed, [1e-3 * t for t in one]).read_labels(1, noise).tolist() == [2]  # of any scale
    for momentum in (0.0, 0.9):
        update = FedAvgUpdate.of(small(), images, labels, lr=0.05, epochs=3, batch=2, momentum=momentum)
        assert torch.equal(update.read_labels(8, noise), labels)
    update.lr /= 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a bias gradient that is too large for one batch
        update.read_labels(8, noise)


# Images found.


@pytest.mark.parametrize("method", ["geiping", "dlg"])
def test_inputs_are_not_modified(method: str) -> None:
    net = network(norm="batch").train().requires_grad_(False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    sent = Gradient(net, [torch.randn(p.shape, generator=derive(1)) for p in net.parameters()])
    state = torch.get_rng_state()
    invert_message(sent, SHAPE, 2, method=method, steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.training
    assert all(p.grad is None and not p.requires_grad for p in net.parameters())


def test_lr_decays_as_in_the_paper_and_has_its_default() -> None:
    """A tenth as large after 3/8, 5/8 and 7/8 of the steps. The total variation has the weight 0.001, or 0 in DLG."""
    start, goal, way = torch.tensor([3.0, 26, -26, 24.5, -24.5]), torch.tensor([0.0, 0, 0, 30, -30]), 0.9966
    assert way == pytest.approx(3 * 0.3 + 3 * 0.03 + 2 * 0.003 + 2 * 0.0003)
    ends = torch.tensor([3 - way, 25 - way, way - 25, 25, -25])  # the start is put into the range of pixels, too
    starts, space = [start.view(1, 1, 1, 5)] * 2, Normalization((0.5,), (0.02,))
    for moved, loss in signed_adam([lambda x: (x - goal).square().sum()] * 2, starts, 10, 0.3, space):
        torch.testing.assert_close(moved, ends.view(1, 1, 1, 5))
        assert loss == pytest.approx(float((ends - goal).square().sum()), rel=1e-5)
    sent = Gradient.of(network("relu"), pictures(1), torch.tensor([2]))
    options: dict[str, list[dict[str, Any]]] = {
        "geiping": [{"lr": 0.1, "total_variation": 0.001}, {"lr": 0.3}, {"total_variation": 0.1}],
        "dlg": [{"total_variation": 0.0}, {"total_variation": 0.001}],
    }
    for method, every in options.items():
        default, stated, *others = (
            invert_message(sent, SHAPE, steps=3, method=method, **given).images for given in ({}, *every)
        )
        assert torch.equal(default, stated)
        assert not any(torch.equal(default, other) for other in others)
    pulled, free = (invert_message(sent, SHAPE, steps=3, restarts=2, group=pull).losses for pull in (9.0, 0.0))
    assert pulled != free  # one image, too
    row = torch.tensor([[[[0.0, 1.0, 3.0]]]])
    assert [float(_variation(one)) for one in (row, row.mT, row[..., :2], row[..., :1])] == [1.5, 1.5, 1.0, 0.0]


def test_class_of_one_record_sends_the_record() -> None:
    net, truth, labels = network("relu", width=16), pictures(2), torch.tensor([0, 3])
    embed: Callable[[Tensor], Tensor] = net.features  # type: ignore[assignment]
    sent = ClassMeans.of([embed], truth, labels, 5)
    assert [list(m.shape) for m in sent.observed] == [[2, 256]]
    assert sent.present.tolist() == [True, False, False, True, False]
    two = ClassMeans.of([embed, nn.Flatten()], truth, labels, 5)
    for rows in (two.observed, two.replay(truth, labels)):
        torch.testing.assert_close(rows, (sent.observed[0], truth.flatten(1)))
    found = invert_message(sent, SHAPE, 2, method="dlg", steps=8)
    assert found.labels.tolist() == [0, 3]
    assert float(psnr(found.images, truth).min()) > 40


def test_record_counts_determine_the_labels() -> None:
    means = torch.tensor([[1.0, 2.0], [0.0, 0.0], [torch.nan, torch.nan], [0.5, 0.0]])
    message = ClassMeans([lambda x: x.flatten(1)[:, :2]], [means], counts=torch.tensor([2, 0, 0, 1]))
    assert message.present.tolist() == [True, False, False, True]
    assert message.read_labels(3, means).tolist() == [0, 0, 3]
    x = torch.tensor([[1.0, 1], [1, 3], [0.5, 0]]).view(3, 1, 1, 2)
    assert torch.equal(message.replay(x, torch.tensor([0, 0, 3]))[0], message.observed[0])
    assert message.replay(x, torch.tensor([2, 3, 3]))[0].tolist() == [[0, 0], [0.75, 1.5]]  # rows of classes 0 and 3


@pytest.mark.parametrize(("method", "group"), [("geiping", 0.0), ("geiping", 0.25), ("dlg", 0.0)])
@pytest.mark.parametrize("known", [False, True])
def test_each_restart_has_its_start_and_labels_and_the_best_is_returned(
    method: str, group: float, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of labels is unknown for batches, so that of several restarts gives each image each label."""
    net, space, truth = small(), Normalization((0.4,), (0.3,)), torch.tensor([4, 0, 1])
    made = FedAvgUpdate.of(net, space.encode(pictures(3)), truth, lr=0.05, batch=1)
    looked: list[Tensor] = []

    class Sent(FedAvgUpdate):
        def read_labels(self, count: int, noise: Tensor) -> Tensor:
            looked.append(noise)
            return truth.sort().values

    scale = -0.5 if known else 2.0
    sent = Sent(net, [scale * t for t in made.observed], lr=0.05, batch=1)
    given, x = sent.observed, torch.randn(3, *SHAPE, generator=derive(1))
    ends = [space.encode(torch.rand(3, *SHAPE, generator=derive(2, r))) for r in range(5)]
    reached, asked = (3.0, 0.5, 2.0, 0.25, 1.0), []

    def adam(losses: Any, starts: Any, steps: int, lr: float, normalization: Any, pull: Any = None) -> Any:
        assert (steps, lr, normalization, pull is None) == (4800, 0.2, space, not group)
        first = len(asked)
        asked.extend(zip(losses, starts))
        if pull is not None:
            for images in ({r: ends[r] for r in (0, 3)}, dict.fromkeys((0, 3), ends[0])):  # the latter may be equal
                for r, mean in group_mean(images, dict(enumerate(used()))).items():
                    gap = images[r] - mean
                    wanted = group * gap / gap.square().sum().sqrt().clamp(min=1e-30)
                    torch.testing.assert_close(pull(images)[r], wanted)
        return [(ends[r], reached[r]) for r in range(first, len(asked))]

    def search(loss: Any, start: Tensor, steps: int) -> Any:
        assert steps == 300
        asked.append((loss, start))
        return ends[len(asked) - 1], reached[len(asked) - 1]

    def slow(labels: Tensor) -> float:
        a, b = (torch.cat([t.detach().flatten() for t in side]) for side in (made.replay(x, labels), made.observed))
        far = (a - b).square().sum() / b.square().sum() if method == "dlg" else 1 - F.cosine_similarity(a, b, dim=0)
        steps = [x.detach().diff(dim=d).abs().mean() for d in (2, 3)]
        return float(far + 0.2 * sum(steps) + 0.5 * x.detach().mean() + 0.25 * x.detach().max())

    def used() -> list[Tensor]:
        """Return the labels of each restart, by its loss."""
        every = [torch.tensor(order) for order in permutations(truth.tolist())]
        return [min(every, key=lambda y: abs(slow(y) - float(loss(x.requires_grad_()).detach()))) for loss, _ in asked]

    def to_pixels(x: Tensor, loss: Any, normalization: Normalization) -> Tensor:
        assert any(x is end and loss is one for end, (one, _) in zip(ends, asked))
        return _to_pixels(x, loss, normalization)

    monkeypatch.setattr("attacks.inversion.reconstruction._to_pixels", to_pixels)
    monkeypatch.setattr("attacks.inversion.reconstruction.signed_adam", adam)
    monkeypatch.setattr("attacks.inversion.reconstruction.lbfgs", search)
    options: Any = {"method": method, "restarts": 5, "scale": scale, "normalization": space, "group": group}
    options |= {"total_variation": 0.2, "priors": [(0.5, torch.mean), (0.25, lambda x: x.max().view(1))]}
    options |= {} if method == "dlg" else {"lr": 0.2}
    found = invert_message(sent, SHAPE, 3, labels=truth if known else None, seed=7, **options)
    assert sent.observed is given
    assert all(float(loss(x).detach()) == pytest.approx(slow(y), rel=1e-4) for (loss, _), y in zip(asked, used()))
    assert len({tuple(start.flatten().tolist()) for _, start in asked}) == 5
    orders = torch.stack(used())
    if known:
        assert orders.tolist() == [truth.tolist()] * 5
    else:
        assert all(sorted(column) == [0, 1, 4] for column in orders[:3].T.tolist())
        assert not torch.equal(orders[3], orders[0])
        start = asked[0][1]
        asked.clear()
        invert_message(sent, SHAPE, 3, seed=8, method="dlg")
        assert not torch.equal(asked[0][1], start)
        assert [one.shape for one in looked] == [(64, *SHAPE)] * 2
        assert not torch.equal(looked[0], looked[1])
    rows = torch.arange(3) if known else orders[3].argsort()
    assert torch.equal(found.labels, orders[3][rows])
    torch.testing.assert_close(found.images, space.decode(ends[3])[rows])
    assert found.losses == reached
    labels = found.labels.tolist()
    assert repr(found) == f"Reconstruction(images=float32 [3, 1, 8, 8], labels={labels}, losses={reached})"


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("kind", range(3))
def test_values_outside_the_box_are_cut_shrunk_or_stretched(kind: int, below: bool) -> None:
    """Whichever has the smallest loss; each image is shrunk to the mean, or stretched, by its own factor."""
    space = Normalization((0.4,), (0.5,))
    x = torch.randn(3, *SHAPE, generator=derive(0)) * torch.tensor([0.1, 1.0, 3.0]).view(3, 1, 1, 1)
    x[1, 0, 0, 0] = 0
    x = -x.abs() if below else x
    wanted = []
    for pixels in space.decode(x):
        values = pixels.flatten().tolist()
        share = min([1.0, *((0.6 if v > 0.4 else -0.4) / (v - 0.4) for v in values)])
        low, high = min(0.0, *values), max(1.0, *values)
        made = pixels.clamp(0, 1), 0.4 + share * (pixels - 0.4), (pixels - low) / (high - low)
        wanted.append(made[kind])
    target = torch.stack(wanted)
    for rest in (1.0, math.nan):

        def loss(one: Tensor, rest: float = rest) -> Tensor:
            assert one.requires_grad  # as in a search
            distance = (space.decode(one) - target).square().sum()
            return torch.where(distance > 1e-6, rest, distance)

        torch.testing.assert_close(_to_pixels(x, loss, space), target)


# Priors.


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_prior_equals_the_losses_and_modifies_nothing(training: bool) -> None:
    net = network("relu", "batch").train()
    with torch.no_grad():
        net(torch.rand(8, *SHAPE, generator=derive(0)))  # other statistics than the first
    net.train(training)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    images = pictures(3).requires_grad_()
    value = batch_norm_prior(net, first_multiplier=2.0)(images)
    assert torch.autograd.grad(value, images)[0].abs().sum() > 0
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    with BatchNormPrior(copied := copy.deepcopy(net).eval(), first_multiplier=2.0) as prior:
        copied(images)
        assert float(value.detach()) == pytest.approx(float(prior.value().detach()), rel=1e-5)


def test_consensus_pairs_images_of_one_class_by_hand() -> None:
    """Two restarts have the same three images up to 0.2, in different orders: each sees the mean in its own order."""
    values = torch.tensor([0.0, 5.0, 9.0]).view(3, 1, 1, 1)
    first, second = values, values[[2, 1, 0]] + 0.2
    means = group_mean({0: first, 1: second}, {0: torch.tensor([1, 1, 0]), 1: torch.tensor([0, 1, 1])})
    assert means[0].flatten().tolist() == pytest.approx([0.1, 5.1, 9.1])
    assert means[1].flatten().tolist() == pytest.approx([9.1, 5.1, 0.1])
    first_labels, mid, last = (torch.tensor(y) for y in ([1, 1, 0], [1, 0, 1], [0, 1, 1]))
    labels = {0: first_labels, 1: mid, 2: last}  # the search of restart 1 has ended
    left = group_mean({2: second, 0: first}, labels)
    assert left[2].flatten().tolist() == pytest.approx([9.1, 5.1, 0.1])
    mixed = {0: torch.tensor([5.0, -9, 9, 0]).view(4, 1, 1, 1), 1: torch.tensor([9.2, 0.2, 5.2, -8.8]).view(4, 1, 1, 1)}
    cycled = group_mean(mixed, {0: torch.tensor([1, 0, 1, 1]), 1: torch.tensor([1, 1, 1, 0])})
    assert cycled[0].flatten().tolist() == pytest.approx([5.1, -8.9, 9.1, 0.1])
    assert cycled[1].flatten().tolist() == pytest.approx([9.1, 0.1, 5.1, -8.9])
    apart = group_mean({0: first, 1: second}, {0: torch.tensor([1, 1, 0]), 1: torch.tensor([1, 1, 0])})
    assert apart[0].flatten().tolist() == pytest.approx([(0 + 5.2) / 2, (5 + 9.2) / 2, (9 + 0.2) / 2])


@pytest.mark.parametrize("label", [0, 4])
@pytest.mark.parametrize(("method", "distance", "warned"), [
    ("dlg", 0.048, False), ("dlg", 0.052, True), ("geiping", 0.79, False), ("geiping", 0.81, True),
])  # fmt: skip
def test_a_search_that_ends_far_from_the_message_warns(method: str, distance: float, warned: bool, label: int) -> None:
    """No image changes this message, so its distance from the observed one is known."""
    offset = math.sqrt(distance if method == "dlg" else (1 - distance) ** -2 - 1)
    sent = torch.tensor([1, offset], dtype=torch.float64)

    def replay(x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the message at the distance for one of two starts, and its opposite for the other."""
        first = float(x.detach().flatten()[0]) >= 1  # so does the default generator draw
        return [(sent if first is near else -sent) + 0 * x.sum(), torch.zeros(1)]

    for near in (True, False):
        message = ReplayableMessage([torch.tensor([1, 0]).double(), torch.zeros(1)], replay, 5)
        said = rf"no images were found .* \(loss {distance:.2g}\)"
        with pytest.warns(UserWarning, match=said) if warned else warnings.catch_warnings():
            warnings.simplefilter("always" if warned else "error")
            found = invert_message(
                message, SHAPE, 1, labels=torch.tensor([label]), method=method, steps=1, total_variation=0, restarts=2
            )
        assert found.losses[not near] == min(found.losses) == pytest.approx(distance)
        assert max(found.losses) > 1


def test_non_finite_start_stops_without_affecting_others() -> None:
    def loss(x: Tensor) -> Tensor:
        return (x - 0.3).square().sum()

    def fails(x: Tensor) -> Tensor:
        asked.append(x.detach().clone())
        return loss(x) / (0.0 if len(asked) == 3 else 1.0)

    asked: list[Tensor] = []
    pulled: list[list[int]] = []

    def pull(images: dict[int, Tensor]) -> dict[int, Tensor]:
        pulled.append(list(images))
        return {r: torch.full_like(x, -0.1) for r, x in images.items() if not r}  # smaller than the gradient

    starts = [torch.full((1, 1, 2, 2), 0.9), torch.full((1, 1, 2, 2), 0.6)]
    alone = signed_adam([loss], starts[1:], 6, 0.1, IDENTITY)
    found = signed_adam([fails, loss], starts, 6, 0.1, IDENTITY, pull)
    assert len(asked) == 3
    assert torch.equal(found[0][0], asked[1])
    assert found[0][1] == float(loss(asked[1]))
    assert torch.equal(found[1][0], alone[0][0])
    assert found[1][1] == alone[0][1]
    assert pulled == [[0, 1], [0, 1]]  # of one start alone there is no mean to be pulled to
    asked.clear()
    signed_adam([fails, loss, loss], [*starts, starts[1]], 6, 0.1, IDENTITY, pull)
    assert pulled[2:] == [[0, 1, 2]] * 2 + [[1, 2]] * 4
    tried: list[Tensor] = []
    both = [loss, lambda x: (tried.append(x.detach().clone()), loss(x))[1]]
    away = signed_adam(both, starts, 8, 0.1, IDENTITY, lambda images: {1: 99 * (images[1] - 0.7)})[1]
    torch.testing.assert_close(tried[1], starts[1] + 0.1)  # stronger than the gradient, and no part of the loss
    assert torch.equal(away[0], starts[1])
    assert away[1] == float(loss(starts[1]))


def test_lbfgs_stops_on_divergence_or_stagnation_with_its_best() -> None:
    start, calls = torch.full((1, 1, 1, 2), 0.9), []

    def diverges(x: Tensor) -> Tensor:
        calls.append(x.detach().clone())
        return (x - 0.3).square().sum() * (math.inf if len(calls) > 2 else 1.0)

    images, least = lbfgs(diverges, start, 300)
    assert len(calls) < 60
    assert torch.equal(start, torch.full((1, 1, 1, 2), 0.9))
    assert least == min(float((x - 0.3).square().sum()) for x in calls[:2])
    near = start.double() * 0 + 0.3 + 5e-8  # a small gradient does not end the search
    assert lbfgs(lambda x: (x - 0.3).square().sum() / 2, near, 1)[0].tolist() == [
        [[pytest.approx([0.3] * 2, abs=1e-12)]]
    ]
    calls.clear()
    assert torch.equal(lbfgs(lambda x: x.sum() / 0, start, 3)[0], start)
    images, least = lbfgs(lambda x: (calls.append(x.detach()), (x * 0).sum())[1], start, 300)
    assert torch.equal(images, start)
    assert least == 0
    assert len(calls) < 60


def test_without_a_bias_the_label_is_inferred_from_the_weight() -> None:
    last = nn.Sequential(nn.Flatten(), nn.Linear(64, 3, bias=False))
    for label in range(3):
        sent = Gradient.of(last, pictures(1), torch.tensor([label]))
        assert sent.read_labels(1, pictures(1)).tolist() == [label]
    with pytest.raises(ValueError, match=r"labels must be given: .* last parameter is \[3, 64\] for 3 classes"):
        Gradient.of(last, pictures(2), torch.tensor([0, 1])).read_labels(2, pictures(1))
    last = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.PReLU())
    last.register_parameter("unused", nn.Parameter(torch.ones(2)))
    sent = Gradient.of(last, pictures(1), torch.tensor([1]))
    assert sent.observed[0].tolist() == [0, 0]
    refused(lambda: sent.read_labels(1, pictures(1)), ValueError, r"last parameter is \[1\] for 3 classes")


def test_class_is_absent_if_no_embedding_has_a_mean() -> None:
    rows = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [3.0, 1.0], [0.0, 0.0]])
    found = ClassMeans([torch.flatten] * 2, rows)
    assert found.present.tolist() == [True, True, False]
    assert [len(one) for one in found.observed] == [2, 2]


NET = network()
SENT = Gradient.of(NET, pictures(1), torch.tensor([0]))
ONES = [torch.ones_like(p) for p in NET.parameters()]
ROWS = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
Y, ZERO = torch.tensor([0]), torch.zeros(1, *SHAPE)
PAIR = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.AdaptiveMaxPool2d(1, return_indices=True))
THREE = Normalization([0.1] * 3, [1] * 3)
HIGH = nn.Sequential(nn.Flatten(0, 2), nn.Linear(8, 2))
LOW = nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (1, -1)), nn.Linear(128, 2))
EMBED: Any = (lambda x: x.flatten(1)[:, :2], nn.Flatten())


def inverted(sent: Any, net: nn.Module = NET, shape: tuple[int, ...] = SHAPE, **options: Any) -> object:
    return invert_message(Gradient(net, sent), shape, steps=1, **options)


def replayed(replay: Any, labels: Tensor | None = Y, count: int = 4) -> object:
    return invert_message(ReplayableMessage(SENT.observed[:count], replay, 5), SHAPE, labels=labels, steps=1)


def weighed(*priors: Any) -> object:
    return invert_message(SENT, SHAPE, priors=priors, steps=1)


def of_two(*order: Tensor, epochs: int = 1) -> object:
    return FedAvgUpdate.of(NET, pictures(2), torch.tensor([0, 1]), lr=0.1, epochs=epochs, order=order)


def cleared(x: Tensor, y: Tensor) -> Any:
    x.data.zero_()
    return SENT.replay(x, y)


BAD: list[tuple[Any, str]] = [
    (lambda: inverted(ONES[:-1]), "gradients must be 4 tensors"),
    (lambda: inverted([ONES[0].mT[0], *ONES[1:]]), r"got \[1, 3, 3\], not \[8, 1, 3, 3\]"),
    (lambda: inverted([ONES[0][:3], *ONES[1:]]), r"got \[3, 1, 3, 3\], not \[8, 1, 3, 3\]"),
    (lambda: inverted([0 * g for g in ONES]), "gradients must not be empty or all 0"),
    (lambda: inverted([*ONES[:3], ONES[3] / 0]), r"gradients\[3\] must be finite"),
    (lambda: inverted(ONES, shape=(3, 8, 8)), r"network must take images of shape \[1, 3, 8, 8\]: "),
    (lambda: inverted([ONES[0][:2, :, :1, :1]], PAIR[0]), r"network must give logits \[N, K\], got \[1, 2, 8, 8\]"),
    (lambda: inverted([ONES[0][:2, :, :1, :1]], PAIR), r"network must give logits \[N, K\], got tuple"),
    (lambda: inverted([torch.ones(2, 8), torch.ones(2)], HIGH), r"network must give logits \[N, K\], got \[8, 2\]"),
    (lambda: inverted([torch.ones(2, 128), torch.ones(2)], LOW, count=2), r"give logits \[N, K\], got \[1, 2\]"),
    (lambda: inverted(ONES[:0], nn.Flatten()), "gradients must not be empty"),
    (lambda: inverted(ONES[:2], nn.Linear(1, 1, device="meta")), "on the device 'meta'; build it on"),
    (lambda: inverted(ONES, method="dlg", lr=0.1), "only .*, got 0.1 for 'dlg'"),
    (lambda: inverted(ONES, labels=Y + 5), "labels must be below num_classes=5"),
    (
        lambda: inverted(ONES, labels=F.one_hot(Y.repeat(2), 5)),
        r"class indices, int \[1\], got rows \[2, 5\]; pass labels.argmax\(1\)",
    ),
    (lambda: inverted(list(NET.parameters())), "gradients must be a gradient .*: subtract the weights"),
    (lambda: inverted(ONES, normalization=THREE), r"must have one value per channel of \(1, 8, 8\), got 3"),
    (lambda: inverted(ONES, shape=(8, 8, 8), normalization=THREE), r"one value per channel of \(8, 8, 8\), got 3"),
    (lambda: invert_message(SENT, SHAPE, group=0.1), "group needs .* at least 2 restarts, got 'geiping' and 1"),
    (lambda: invert_message(SENT, SHAPE, method="dlg", restarts=2, group=0.1), "group needs .* got 'dlg' and 2"),
    (lambda: weighed((1.0, torch.mean), (1.0, lambda x: x.data.zero_().sum())), r"priors\[1\] must not change its"),
    (lambda: weighed(torch.mean), "priors must be a list of pairs"),
    (lambda: weighed((-1.0, torch.mean)), "priors must be .*at least 0"),
    (lambda: weighed((1.0, torch.mean), (1.0, torch.mean, 3)), "priors must be 2 pairs"),
    (lambda: weighed((1.0, 3)), "give a function of images to a scalar, got int"),
    (lambda: weighed((1.0, torch.mean), (1.0, lambda x: x.sum() / 0)), r"priors\[1\] .*inf"),
    (lambda: weighed((1.0, lambda x: x.flatten())), r"one finite number .*got \[64\], \[[^,]*\]$"),
    (lambda: weighed((1.0, lambda x: 3.0)), "one finite number as a tensor, got float"),
    (lambda: replayed(SENT.replay, None), "labels must be given"),
    (lambda: replayed(SENT.replay, count=1), r"observed shapes, \[\[8, 1, 3, 3\]\], got \[\[8, 1, 3, 3\], \[8\],"),
    (lambda: replayed(lambda x, y: SENT.observed), "message must be replayed differentiably"),
    (lambda: replayed(lambda x, y: (*SENT.replay(x, y)[:-1], ONES[-1] / 0)), "tensor 3 of the .* must be finite"),
    (lambda: replayed(lambda x, y: [][0]), r"replay images \[1, .*labels \[1\]: list"),
    (lambda: replayed(cleared), "replay must not change its images"),
    (lambda: replayed(SENT.replay, Y + 5), "labels must be below num_classes=5"),
    (lambda: replayed(lambda x: x), "replay is called as"),
    (lambda: ReplayableMessage(SENT.observed, SENT.replay, 1), "num_classes must be at least 2"),
    (lambda: ReplayableMessage([torch.ones(2) / 0], SENT.replay, 5), r"observed\[0\] must be finite"),
    (lambda: FedAvgUpdate(NET, ONES[1:], lr=0.1), "update must be 4 tensors"),
    (lambda: FedAvgUpdate(NET, ONES, lr=0.1, momentum=1.0), "momentum must be less than 1"),
    (lambda: FedAvgUpdate(NET, ONES, lr=0.1, order=[Y, Y - 1]), "order must be at least 0, got -1"),
    (lambda: FedAvgUpdate(NET, ONES, lr=0.1, order=[]), "order must hold at least one batch, got none"),
    (lambda: FedAvgUpdate(NET, ONES, lr=0.1, batch=1, order=[torch.tensor([0])]), "order replaces epochs and batch"),
    (lambda: FedAvgUpdate(NET, ONES, lr=0.1, epochs=2, order=[torch.tensor([0])]), "order replaces epochs and batch"),
    (lambda: of_two(*[Y] * 3), r"have 1 batch\(es\), as epochs=1 and batch=None make of 2 images, got 3: give epochs"),
    (lambda: of_two(Y, epochs=2), "order must have 2 batch"),
    (lambda: FedAvgUpdate(NET, ONES, lr=0.1, order=[Y + 1, Y]).replay(ZERO, Y), "into the 1 images, got the index 1"),
    (lambda: FedAvgUpdate(NET, ONES, lr=0.1, order=[Y, Y + 2]).replay(ZERO, Y), "into the 1 images, got the index 2"),
    (lambda: invert_message(ClassMeans(EMBED, [ROWS, ROWS[:, [0, 1, 1]]]), SHAPE), r"give \[N, 3\], .*, got \[1, 64\]"),
    (lambda: ClassMeans([torch.flatten, lambda: 0], [ROWS, ROWS]), "embeddings is called as"),
    (lambda: ClassMeans([torch.flatten], [ROWS, ROWS]), "means must be 1 tensors"),
    (lambda: ClassMeans([torch.flatten] * 2, [ROWS, ROWS.int()]), r"means\[1\] must be a floating tensor"),
    (lambda: ClassMeans([torch.flatten], [ROWS[:, :0]]), r"means must be .* got \[2, 0\]"),
    (lambda: invert_message(ClassMeans([nn.Linear(3, 2)], [ROWS]), SHAPE), r"embeddings must take images .*8, 8\]"),
    (lambda: ClassMeans([], []), r"means must hold at least one tensor \[K, F\], got none"),
    (lambda: ClassMeans([torch.flatten], [ROWS[:, None]]), r"means must be \[K, F\] .* got \[2, 1, 2\]"),
    (lambda: ClassMeans.of([torch.flatten], ROWS, Y, 2), r"images must have 4 dimensions"),
    (lambda: ClassMeans.of([torch.flatten], ZERO, Y + 2, 2), "labels must be below num_classes=2, got 2"),
    (lambda: ClassMeans([lambda x: 0], [ROWS]).count_classes(ZERO), r"must give \[N, 2\], .* means, got int"),
    (lambda: ClassMeans([lambda x: ROWS], [ROWS]).count_classes(ZERO), r"must give \[N, 2\], .* got \[2, 2\]"),
    (lambda: ClassMeans([torch.flatten], [ROWS], counts=torch.tensor([1, -1])), "counts must be at least 0, got -1"),
    (lambda: ClassMeans([torch.flatten], [ROWS], counts=Y + 1), "counts must be one per class, 2, and 0 exactly"),
    (lambda: ClassMeans([torch.flatten], [ROWS[0]]), r"means must be \[K, F\] of the same classes, got \[2\]"),
    (lambda: ClassMeans([torch.flatten] * 2, [ROWS, ROWS[:1]]), r"means must be \[K, F\] of the same .*got \[1, 2\]"),
    (lambda: ClassMeans([torch.flatten], [torch.tensor([[1.0, torch.nan], [1, 2]])]), "finite rows for all"),
    (lambda: ClassMeans([torch.flatten], [0 * ROWS]), "means must have a row for at least one class"),
    (lambda: ClassMeans([torch.flatten] * 2, [ROWS, ROWS / 0]), "means must .* finite rows"),
    (lambda: ClassMeans([torch.flatten], [ROWS], counts=torch.tensor([1, 1])), "per class, 2, and 0 exactly for those"),
    (lambda: ClassMeans([torch.flatten], [ROWS], counts=torch.tensor([0, 0])), "per class, 2, and 0 exactly for those"),
    (lambda: ClassMeans([torch.flatten], [torch.eye(3)[:2]]).read_labels(1, ROWS), "1 images differ from 2, one per"),
    (lambda: ClassMeans([torch.flatten], [ROWS]).read_labels(3, ROWS), "3 images differ from 1, one per class with a"),
    (lambda: batch_norm_prior(NET), "network must have a BatchNorm layer"),
    (lambda: batch_norm_prior(nn.BatchNorm2d(1).eval(), first_multiplier=-1.0), "first_multiplier"),
]


WRONG: list[tuple[Any, dict[str, Any]]] = [
    (partial(FedAvgUpdate, NET, ONES, lr=0.1), {"lr": 0, "epochs": 0, "batch": 0, "momentum": -1, "weight_decay": -1}),
    (partial(invert_message, SENT, SHAPE), {
        "count": 0, "labels": Y.repeat(2), "method": "x", "steps": 0, "lr": 0.0, "total_variation": -1, "group": -1,
        "restarts": 0, "scale": 0, "normalization": None, "seed": -1, "device": "x",
    }),
    (partial(invert_message, message=SENT, shape=SHAPE), {"shape": (1, 0, 8), "message": NET}),
]  # fmt: skip
BAD += [(partial(call, **{name: value}), f"^{name} must") for call, wrong in WRONG for name, value in wrong.items()]


@pytest.mark.parametrize(("call", "said"), BAD, ids=range(len(BAD)))
def test_invalid_arguments_are_named(call: Any, said: str) -> None:
    refused(call, (TypeError, ValueError), said)


def test_weights_and_modes_are_named() -> None:
    for inputs, cosine in ((49, 0.99), (50, 0.89), (50, 0.91), (50, -0.91)):  # fewer than 100 weights may by chance
        layer = nn.Linear(inputs, 2, bias=False)
        aside = layer.weight.flip(0) * torch.tensor([[1.0], [-1.0]])  # orthogonal, of the same norm
        with (
            pytest.raises(ValueError, match="in the direction of") if (inputs, cosine) == (50, 0.91) else nullcontext()
        ):
            Gradient(layer, [cosine * layer.weight + (1 - cosine**2) ** 0.5 * aside])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            labels = Y + 3
            refused(lambda: invert_message(SENT, SHAPE, steps=1), ValueError, "leave torch.no_grad")
    assert invert_message(SENT, SHAPE, labels=labels, steps=1).labels.tolist() == [3]
    net = network(norm="batch").eval()
    sent = Gradient.of(net, pictures(1), Y).observed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gradient(net, sent)
    with pytest.warns(UserWarning, match="training mode and has BatchNorm2d and Dropout, so"):
        Gradient(nn.Sequential(net, nn.Dropout(0.5)).train(), sent)
    part = nn.Sequential(net.eval(), nn.Dropout1d(0.5).train())
    for made in (Gradient, partial(FedAvgUpdate, lr=0.1)):
        part.training = False  # the mode of each layer counts
        with pytest.warns(UserWarning, match="training mode and has Dropout1d, so") as seen:
            made(part, sent)  # type: ignore[operator]
        assert [one.filename for one in seen] == [__file__]


@pytest.mark.parametrize(
    ("search", "asked"),
    [(lambda f, x: signed_adam([f], [x], 12, 0.3, IDENTITY)[0], 13), (lambda f, x: lbfgs(f, x, 2), 40)],
)
def test_best_of_all_iterates_is_returned(search: Any, asked: int) -> None:
    """The loss is bumpy, so that the last iterate is rarely the best one; L-BFGS asks 20 times in a step."""
    last_was_best, counts = 0, set()
    for seed in range(8):
        tried: list[tuple[float, Tensor]] = []

        def bumpy(x: Tensor, tried: list[tuple[float, Tensor]] = tried) -> Tensor:
            value = (x - 0.5).square().sum() + (15 * x).sin().sum()
            tried.append((float(value.detach()), x.detach().clone()))
            return value

        images, least = search(bumpy, torch.rand(1, 1, 2, 2, generator=derive(seed), dtype=torch.float64))
        best = min(tried, key=lambda one: one[0])
        assert least == best[0]
        assert torch.equal(images, best[1])
        last_was_best += tried[-1][0] == best[0]
        counts.add(len(tried))
    assert last_was_best < 8
    assert max(counts) == asked


def test_dlg_finds_images_and_their_labels_in_a_normalized_space() -> None:
    net, truth, space = network(), pictures(2), Normalization((0.4,), (0.3,))
    sent = Gradient.of(net, space.encode(truth), torch.tensor([4, 1]))
    found = invert_message(sent, SHAPE, 2, method="dlg", steps=16, normalization=space)
    assert found.labels.tolist() == [1, 4]
    assert float(psnr(found.images[match(found.images, truth)], truth).min()) > 30
