from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distillkit.networks import build, split
from distillkit.networks.samplers import FixedNetwork, RandomNetworks
from distillkit.privacy import (
    Ledger,
    NotCapturable,
    PublicEmbedders,
    Secret,
    image_gradients,
    image_sgd,
    separable,
)
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy.faulty_network import Layer
from tests.distillkit.privacy.options import condensed, grouped
from tests.refused import refused

Factory = Callable[[], nn.Module]


def private(toy_set: LabeledImages, toy_network: Factory, **options: object) -> LabeledImages:
    options = {"networks": RandomNetworks(toy_network), "size": 12, "sigma": 1.0, "rate": 0.5} | options
    return image_sgd(toy_set, **grouped(**{"steps": 3, "ipc": 2, "clip": 1.0} | options))  # type: ignore[arg-type]


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
    assert {len(p) for p in parts} <= {*range(1, chunk + 1)}
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


def branching() -> nn.Module:
    signed = Layer(lambda m, x: x if x.mean() > 0 else -x)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), signed, nn.Linear(5, 3)).double()


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
    options = {"loss": losses[case]} if case in losses else {"networks": RandomNetworks(branching)}
    with pytest.raises(NotCapturable, match="the loss draws random numbers" if case == "draws" else None):
        private(toy_set, toy_network, rate=rate, ledger=ledger, **options)
    assert not ledger.events


@pytest.mark.filterwarnings("error")
def test_images_changed_far_by_noise_are_valid_input(toy_set: LabeledImages, toy_network: Factory) -> None:
    for found in (private(toy_set, toy_network, lr=1e6), condensed(toy_set, toy_network, lr=1e6)):
        assert float(found.images.abs().max()) > 1e3
    single, networks = toy_set.to(dtype=torch.float32), RandomNetworks(lambda: toy_network().float())
    words = "NaN or Inf in the optimized images: the optimization diverged; lower lr"
    options = {"networks": networks, "lr": 1e37, "clip": 1e30}
    refused(lambda: private(single, toy_network, **options), FloatingPointError, words)


def test_network_is_traced_once_for_all_steps_and_again_if_its_result_changes(
    toy_set: LabeledImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(nn.Module):
        scale, traces = 1.0, 0

        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(16, 3).double()

        def features(self, x: Tensor) -> Tensor:
            Scaled.traces += 1
            shift = getattr(self.classifier, "shift", 0.0)
            return 1e-5 * (x.flatten(1) * self.scale + self.classifier.weight.sum() + shift)

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.features(x))

    def traces(steps: int, networks: object) -> int:
        Scaled.traces = 0
        private(toy_set, Scaled, steps=steps, networks=networks)
        return Scaled.traces

    for networks in (FixedNetwork(build(Scaled, 0)), RandomNetworks(Scaled)):
        assert traces(4, networks) - traces(1, networks) == 3  # each step compares the network with its capture
    before, after, poisson = [], [], Secret.poisson
    monkeypatch.setattr(Secret, "poisson", lambda *given: before.append(Scaled.traces) or poisson(*given))
    fresh = SimpleNamespace(draw=lambda generator: build(Scaled, generator), fixed=False)
    private(toy_set, Scaled, networks=fresh, callback=lambda step, gradient: after.append(Scaled.traces))
    assert before == after  # no code of the user runs after a draw
    assert len({*after}) == 3
    sampler = RandomNetworks(Scaled)
    embedders = PublicEmbedders(sampler, 6, like=toy_set, centers=0)
    network = sampler.draw(derive(0))
    for k, (holder, name, value) in enumerate([
        (Scaled, "scale", 1.0), (Scaled, "scale", 1.0), (Scaled, "scale", 3.0), (network, "scale", 2.0),
        (network, "scale", 2.0001), (network.classifier, "shift", 1e-4),
    ]):  # fmt: skip
        setattr(holder, name, value)
        embedder = embedders[k]
        alone, together = embedder.embed_private(toy_set.images), embedder.embedding(toy_set.images)
        torch.testing.assert_close(alone, together, rtol=1e-7, atol=0)
