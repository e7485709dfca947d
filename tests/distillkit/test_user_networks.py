"""Every component on user-defined networks and data: two classes, five channels, torchvision's ResNet at 64x64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distillkit import LabeledImages, Normalization
from distillkit.augment import DSA
from distillkit.condense import (
    distribution_matching,
    fit_to_gradient,
    gradient_matching,
    herding,
    k_center,
    random_subset,
)
from distillkit.evaluate import evaluate
from distillkit.generate import invert
from distillkit.losses import BatchNormPrior
from distillkit.networks import FixedNetwork, NetworkBall, RandomNetworks, build, split
from distillkit.select import select
from distillkit.training import Protocol


class Mine(nn.Module):
    """A user's network in ten lines: its head is called `head`, and it flattens with `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 6, 3, padding=1)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x)).mean((2, 3))
        return self.head(x.view(len(x), -1))


def resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=2)


FOREIGN: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "user": (Mine, (5, 9, 7)),
    "resnet": (resnet, (3, 64, 64)),
}


def data(shape: tuple[int, int, int]) -> LabeledImages:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    pixels = torch.rand(6, *shape, generator=generator) * 0.5 + 0.4 * labels.view(-1, 1, 1, 1)
    return LabeledImages.from_pixels(pixels, labels, normalization=Normalization.of(pixels))


def _gradient(net: Any, real: LabeledImages) -> dict[str, torch.Tensor]:
    net = getattr(net, "_orig_mod", net)  # names of parameters without the prefix of compiled networks
    loss = nn.functional.cross_entropy(net(real.images), real.labels)
    params = dict(net.named_parameters())
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


COMPONENTS: dict[str, Callable[[Callable[[], nn.Module], nn.Module, LabeledImages], LabeledImages]] = {
    "DM": lambda make, net, real: distribution_matching(real, networks=RandomNetworks(make), ipc=1, steps=1),
    "FedLGD's DM": lambda make, net, real: distribution_matching(
        real, networks=FixedNetwork(net), ipc=1, steps=1, augment=DSA()
    ),
    "FedDM's DM": lambda make, net, real: distribution_matching(
        real, networks=NetworkBall(net, 1.0), ipc=1, steps=1, match="embedding+logits"
    ),
    "DSA": lambda make, net, real: gradient_matching(
        real, networks=RandomNetworks(make), ipc=1, iterations=1, augment=DSA()
    ),
    "a given gradient": lambda make, net, real: fit_to_gradient(net.eval(), real, _gradient(net.eval(), real), steps=1),
    "random": lambda make, net, real: random_subset(real, ipc=2),
    "herding": lambda make, net, real: herding(real, ipc=2, network=net),
    "k-center": lambda make, net, real: k_center(real, ipc=2, network=net),
    "inversion": lambda make, net, real: invert(
        net, torch.tensor([0, 1]), shape=real.shape, student=build(make, 1), steps=1, normalization=real.normalization
    ),
}


@pytest.mark.parametrize("network", FOREIGN)
@pytest.mark.parametrize("component", COMPONENTS)
def test_component_runs_on_user_defined_networks(component: str, network: str) -> None:
    make, shape = FOREIGN[network]
    real, net = data(shape), build(make, 0)
    made = COMPONENTS[component](make, net, real)
    assert made.shape == shape
    assert made.num_classes == 2
    assert made.normalization == real.normalization
    assert set(made.labels.tolist()) == {0, 1}
    assert torch.isfinite(made.images).all()
    # A compiled network, which has run before without the hooks that observe it, gives the same.
    compiled: nn.Module = torch.compile(net, backend="eager")  # type: ignore[assignment]
    mode = net.training
    compiled.eval()(real.images)
    net.train(mode)
    again = COMPONENTS[component](lambda: torch.compile(make(), backend="eager"), compiled, real)  # type: ignore[arg-type, return-value]
    assert torch.equal(again.images, made.images)


@pytest.mark.parametrize("network", FOREIGN)
def test_evaluation_selection_and_priors_run_on_user_defined_networks(network: str) -> None:
    make, shape = FOREIGN[network]
    real, net = data(shape), split(build(make, 0).eval())
    result = evaluate(real[:4], real, make, num_networks=1, protocol=Protocol(epochs=1, batch=4), real=real)
    assert 0 <= result.accuracy <= 1
    with torch.no_grad():
        embedding = net.features(real.images)
        kept = select(embedding, net.classifier(embedding), keep=2, clusters=2)
    assert len(kept) == 2
    if network == "resnet":
        with BatchNormPrior(net.model) as prior:  # type: ignore[attr-defined]
            net(real.images)
            assert float(prior.value().detach()) > 0
    else:
        with pytest.raises(ValueError, match="BatchNorm"):
            BatchNormPrior(net.model)  # type: ignore[attr-defined]
