from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distillkit.networks import build, split
from distillkit.networks.samplers import FixedNetwork, RandomNetworks
from distillkit.privacy import (
    BudgetExhausted,
    Ledger,
    NotCapturable,
    PrivacyError,
    PrivateGradient,
    PublicEmbedders,
    Secret,
    image_gradients,
    image_sgd,
    plan_noise,
    separable,
    squared_distance,
)
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy.options import grouped

Factory = Callable[[], nn.Module]


def private(toy_set: LabeledImages, toy_network: Factory, **options: object) -> LabeledImages:
    defaults = {
        "size": 12,
        "sigma": 1.0,
        "rate": 0.5,
        "steps": 3,
        "ipc": 2,
        "networks": RandomNetworks(toy_network),
        "clip": 1.0,
    }
    return image_sgd(toy_set, **grouped(**defaults | options))  # type: ignore[arg-type]


def phi(model: nn.Module) -> Callable[[Tensor], Tensor]:
    network = split(model)
    return lambda x: torch.cat([network.features(x), network.classifier(network.features(x))], 1)


@pytest.mark.parametrize("batched", [False, True])
@settings(max_examples=4)
@given(st.integers(0, 1000), st.integers(1, 5))
def test_example_gradients_equal_those_of_each_examples_loss(batched: bool, seed: int, chunk: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = build(lambda: model, generator)
    embed = phi(model)
    real, synthetic = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (3, 2, 4)))
    labels = torch.randint(2, (6,), generator=generator)
    parts = list(image_gradients(synthetic, embed, embed(real).detach(), labels, chunk=chunk, batched=batched))
    assert max(len(p) for p in parts) <= chunk
    order = labels.argsort(stable=True)
    for grads, i in zip(torch.cat(parts), order.tolist(), strict=True):
        leaf = synthetic.clone().requires_grad_()
        loss = (embed(real[i : i + 1])[0] - embed(leaf[labels[i]]).mean(0)).square().sum()
        torch.testing.assert_close(grads, torch.autograd.grad(loss, leaf)[0])
    counts = torch.bincount(labels, minlength=3)
    leaf = synthetic.clone().requires_grad_()
    owned = [c for c in range(3) if counts[c]]
    eq8 = sum((embed(real[labels == c]).mean(0) - embed(leaf[c]).mean(0)).square().sum() for c in owned)
    weights = counts[labels[order]].double().reciprocal().view(-1, 1, 1, 1)
    torch.testing.assert_close((torch.cat(parts) * weights).sum(0), torch.autograd.grad(eq8, leaf)[0])


def test_another_separable_loss_is_accepted(toy_set: LabeledImages, toy_network: Factory) -> None:
    @separable
    def absolute(embedding: Tensor, means: Tensor) -> Tensor:
        return (embedding - means).abs().sum(1)

    embed = phi(build(toy_network, 0))
    synthetic = torch.randn(3, 2, 1, 4, 4, generator=derive(0), dtype=torch.float64)
    real = embed(toy_set.images).detach()
    total = torch.cat(list(image_gradients(synthetic, embed, real, toy_set.labels, loss=absolute))).sum(0)
    leaf = synthetic.clone().requires_grad_()
    means = torch.stack([embed(leaf[c]).mean(0) for c in range(3)])
    torch.testing.assert_close(total, torch.autograd.grad((real - means[toy_set.labels]).abs().sum(), leaf)[0])


def test_without_noise_and_clip_it_is_distribution_matching(toy_set: LabeledImages, toy_network: Factory) -> None:
    seen: list[Tensor] = []
    options = {"sigma": 0.0, "clip": math.inf, "rate": 1.0, "lr": 0.3, "momentum": 0.5}
    result = private(toy_set, toy_network, **options, callback=lambda step, g: seen.append(g.clone()))
    assert result.info["epsilon"] is None
    assert "without noise" in result.info["reason"]

    seed = int(torch.randint(2**62, (), generator=derive(0)))
    embedders = PublicEmbedders(
        RandomNetworks(toy_network), 3, like=toy_set, match="embedding+logits", centers=0, seed=seed, clip=math.inf
    )
    shape = (6, 1, 4, 4)
    images = torch.randn(shape, generator=derive(seed, "start"), dtype=torch.float64)
    velocity = torch.zeros_like(images)
    for step in range(3):
        leaf = images.clone().requires_grad_()
        embed = embedders[step]
        real, synthetic = embed(toy_set.images), embed(leaf).view(3, 2, -1).mean(1)
        loss = sum((real[toy_set.labels == c].mean(0) - synthetic[c]).square().sum() for c in range(3))
        (gradient,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(seen[step].flatten(0, 1), gradient, atol=1e-10, rtol=1e-10)
        velocity = 0.5 * velocity + gradient
        images = images - 0.3 * velocity
    torch.testing.assert_close(result.images, images, atol=1e-10, rtol=1e-10)


@given(st.integers(0, 11))
def test_one_record_changes_the_sum_by_at_most_the_clip(index: int) -> None:
    generator = torch.Generator().manual_seed(index)
    grads = 3 * torch.randn(12, 2, 3, generator=generator, dtype=torch.float64)
    grads[::3] *= 0.01

    def total(of: Tensor) -> Tensor:
        parameter = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        gradient = PrivateGradient([parameter], sigma=0.0, clip=0.8, denominator=1.0, secret=Secret(0))
        for part in of.split(5):
            gradient.add([part])
        return gradient.take()[0]

    moved = total(grads) - total(grads[torch.arange(12) != index])
    assert float(moved.norm()) <= 0.8 * (1 + 1e-6)
    length = float(grads[index].norm())
    torch.testing.assert_close(moved, grads[index] * min(1.0, 0.8 / (length + 1e-6)))
    torch.testing.assert_close(total(grads), total(grads[torch.randperm(12, generator=generator)]))


def test_noise_covers_all_pixels_of_all_classes_and_empty_batches(toy_set: LabeledImages, toy_network: Factory) -> None:
    seen: list[Tensor] = []
    nobody = toy_set[:0]
    private(nobody, toy_network, steps=250, sigma=2.0, callback=lambda step, g: seen.append(g.clone()), clip=3.0)
    released = torch.stack(seen)
    assert float((released != 0).double().mean()) > 0.999  # one in 2^20 lies on the grid's 0
    spread = released.transpose(0, 1).flatten(1).std(1)
    torch.testing.assert_close(spread, torch.full((3,), 2.0 * 3.0 / (0.5 * 12 / 3)).double(), rtol=0.05, atol=0)


def test_denominators_are_public(toy_set: LabeledImages, toy_network: Factory) -> None:
    gradients: dict[int, Tensor] = {}
    for size in (12, 24):
        options = {"size": size, "sigma": 0.0, "rate": 1.0, "steps": 1}
        private(toy_set, toy_network, **options, callback=lambda step, g, size=size: gradients.update({size: g}))
    torch.testing.assert_close(gradients[12], 2 * gradients[24])


def test_all_steps_are_charged_first_and_each_draws_once(toy_set: LabeledImages, toy_network: Factory) -> None:
    ledger, secret = Ledger(), Secret()
    result = private(toy_set, toy_network, steps=5, ledger=ledger, secret=secret, client=2, round=1)
    (event,) = ledger.events
    assert (event.mechanism, event.sigma, event.rate, event.count) == ("image_sgd", 1.0, 0.5, 5)
    assert (event.client, event.round, event.sampling, event.seeded) == ("2", 1, "poisson", False)
    assert secret.draws == 5
    assert result.info["epsilon"] == ledger.epsilon(2)
    poor = Ledger(budget=ledger.epsilon() or 0.0)
    with pytest.raises(BudgetExhausted, match="5 of 9 releases of image_sgd fit"):
        private(toy_set, toy_network, steps=9, ledger=poor, secret=secret)
    assert secret.draws == 5


def test_target_epsilon_determines_sigma(
    toy_set: LabeledImages, toy_network: Factory, global_rng_untouched: None
) -> None:
    result = private(toy_set, toy_network, sigma=None, epsilon=3.0, clip=None)
    assert result.info["sigma"] == plan_noise(3.0, 1e-5, count=3, rate=0.5).sigma
    assert 2.9 < result.info["epsilon"] <= 3.0
    assert result.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert bool(torch.isfinite(result.images).all())
    for wrong in ({"epsilon": 3.0}, {"sigma": None}):
        with pytest.raises(PrivacyError, match="either epsilon"):
            private(toy_set, toy_network, **wrong)


def test_default_clip_is_independent_of_the_data(toy_set: LabeledImages, toy_network: Factory) -> None:
    clips = {
        private(data, toy_network, clip=None, steps=1).info["clip"]
        for data in (toy_set, toy_set.replace(images=toy_set.images * 9), toy_set[:0])
    }
    assert len(clips) == 1
    assert clips.pop() > 0


def test_seed_repeats_without_a_guarantee_and_system_noise_does_not(
    toy_set: LabeledImages, toy_network: Factory
) -> None:
    first, second = (private(toy_set, toy_network, secret=3) for _ in range(2))
    assert torch.equal(first.images, second.images)
    assert first.info["epsilon"] is None
    assert not torch.equal(private(toy_set, toy_network).images, private(toy_set, toy_network).images)


def test_noise_without_a_clip_is_refused_and_has_no_side_effects() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    with pytest.raises(PrivacyError, match="clip must be finite"):
        PrivateGradient([parameter], sigma=1.0, clip=math.inf, denominator=1.0, secret=Secret(0))
    with pytest.raises(ValueError, match="clip"):
        PrivateGradient([parameter], sigma=1.0, clip=0.0, denominator=1.0, secret=Secret(0))
    gradient = PrivateGradient([parameter], sigma=1.0, clip=1.0, denominator=1.0, secret=Secret(0))
    gradient.add([torch.ones(3, 2)])
    gradient.take()
    assert vars(parameter) == {}


def test_several_parameters_share_one_clip_and_one_draw() -> None:
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)]
    secret = Secret(0)
    gradient = PrivateGradient(parameters, sigma=0.0, clip=5.0, denominator=2.0, secret=secret)
    gradient.add([torch.tensor([[6.0, 0.0]]), torch.tensor([[8.0]])])
    first, second = gradient.take()
    torch.testing.assert_close(first, torch.tensor([1.5, 0.0]))
    torch.testing.assert_close(second, torch.tensor([2.0]))
    noisy = PrivateGradient(parameters, sigma=1.0, clip=1.0, denominator=1.0, secret=secret)
    noisy.take()
    assert secret.draws == 1


def test_non_finite_gradient_adds_nothing() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    gradient = PrivateGradient([parameter], sigma=0.0, clip=1.0, denominator=1.0, secret=Secret(0))
    gradient.add([torch.tensor([[0.3, 0.0], [math.nan, 1.0], [math.inf, 0.0]])])
    torch.testing.assert_close(gradient.take()[0], torch.tensor([0.3, 0.0]))


def test_squared_distance_is_marked() -> None:
    assert squared_distance.separable is True  # type: ignore[attr-defined]
    rows = squared_distance(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]]))
    assert rows.tolist() == [5.0]


def test_fixed_network_is_accepted(toy_set: LabeledImages, toy_network: Factory) -> None:
    assert len(private(toy_set, toy_network, networks=FixedNetwork(build(toy_network, 0)))) == 6


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)).double()
        self.head = nn.Linear(5, 3).double()

    def features(self, x: Tensor) -> Tensor:
        return self.layers(x) if x.mean() > 0 else -self.layers(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@separable
def branching_loss(embedding: Tensor, means: Tensor) -> Tensor:
    rows = (embedding - means).square().sum(1)
    return rows if all(rows < 1e9) else rows * 0


@separable
def drawing_loss(embedding: Tensor, means: Tensor) -> Tensor:
    return (embedding - means).square().sum(1) + 1e-12 * torch.rand(())


@pytest.mark.parametrize("case", ["network", "loss", "draws"])
@pytest.mark.parametrize("rate", [1.0, 1e-12])
def test_code_that_cannot_be_captured_is_refused_before_the_charge_and_whatever_is_drawn(
    toy_set: LabeledImages, toy_network: Factory, case: str, rate: float
) -> None:
    ledger = Ledger(delta=1e-5)
    losses = {"loss": branching_loss, "draws": drawing_loss}
    options = {"loss": losses[case]} if case in losses else {"networks": RandomNetworks(Branching)}
    with pytest.raises(NotCapturable, match="the loss draws random numbers" if case == "draws" else None):
        private(toy_set, toy_network, rate=rate, ledger=ledger, **options)
    assert not ledger.events


def test_images_changed_far_by_noise_are_valid_input(toy_set: LabeledImages, toy_network: Factory) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = private(toy_set, toy_network, lr=1e6)
    assert float(found.images.abs().max()) > 1e3


def test_network_is_traced_once_for_all_steps_and_again_if_its_result_changes(toy_set: LabeledImages) -> None:
    class Scaled(nn.Module):
        scale, _shift, traces = 1.0, 0.0, 0

        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(16, 3).double()

        def features(self, x: Tensor) -> Tensor:
            Scaled.traces += 1
            return x.flatten(1) * self.scale + self.classifier.weight.sum() + self._shift

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.features(x))

    def traces(steps: int, networks: object) -> int:
        Scaled.traces = 0
        private(toy_set, Scaled, steps=steps, networks=networks)
        return Scaled.traces

    public = 3  # calls in a step on synthetic images, one per class
    for networks in (FixedNetwork(build(Scaled, 0)), RandomNetworks(Scaled)):
        one = traces(1, networks)
        assert traces(4, networks) - one <= 3 * public
    sampler = RandomNetworks(Scaled)
    embedders = PublicEmbedders(sampler, 6, like=toy_set, centers=0)
    network = sampler.draw(derive(0))
    for k, (holder, name, value) in enumerate([
        (Scaled, "scale", 1.0), (Scaled, "scale", 1.0), (Scaled, "scale", 3.0), (network, "scale", 2.0),
        (network, "scale", 2.0001), (network, "_shift", 1e-4),
    ]):  # fmt: skip
        setattr(holder, name, value)
        embedder = embedders[k]
        torch.testing.assert_close(embedder.embed_private(toy_set.images), embedder.embedding(toy_set.images))
