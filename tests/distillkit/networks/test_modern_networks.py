"""Transformers, ConvNeXt and pretrained networks: free parameters, drop path, fused attention, in every component."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distillkit import LabeledImages
from distillkit.condense import InnerTraining, distribution_matching, fit_to_gradient, gradient_matching, herding
from distillkit.condense._parameter_gradient import distance_to_target, parameter_gradient
from distillkit.evaluate import evaluate
from distillkit.generate import invert
from distillkit.networks import ConvNet, FixedNetwork, KeepInit, NetworkBall, RandomNetworks, build
from distillkit.rng import derive
from distillkit.training import Protocol, accuracy, train
from tests.distillkit.test_user_networks import COMPONENTS
from tests.refused import refused

SHAPE, CLASSES = (3, 16, 16), 3


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES)


def swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 8, [1, 1], [1, 2], [2, 2], num_classes=CLASSES, stochastic_depth_prob=0.0)


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=CLASSES)


MODERN = {"vit": vit, "swin": swin, "convnext": convnext}


def data() -> LabeledImages:
    return LabeledImages(torch.rand(6, *SHAPE, generator=derive(0)), torch.tensor([0, 1, 2, 0, 1, 2]))


def weights(network: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def _match(make: Callable[[], nn.Module]) -> LabeledImages:
    net = make().eval()
    target = [torch.randn_like(p) for p in net.parameters()]
    return fit_to_gradient(net, data(), target, steps=1)


CALLS: dict[str, Callable[[Callable[[], nn.Module]], Any]] = {
    "DM": lambda make: distribution_matching(data(), networks=RandomNetworks(KeepInit(make)), ipc=1, steps=1),
    "FedDM": lambda make: distribution_matching(
        data(), networks=NetworkBall(make(), 1.0), ipc=1, steps=1, match="embedding+logits"
    ),
    "FedLGD": lambda make: distribution_matching(data(), networks=FixedNetwork(make()), ipc=1, steps=1),
    "DC": lambda make: gradient_matching(
        data(), networks=RandomNetworks(KeepInit(make)), ipc=2, iterations=1, inner=InnerTraining(loops=(2, 1)), chunk=1
    ),
    "given gradient": _match,
    "herding": lambda make: herding(data(), ipc=1, network=make()),
    "evaluate": lambda make: evaluate(
        data(), data(), KeepInit(make), num_networks=1, protocol=Protocol(epochs=1, batch=6)
    ),
    "invert": lambda make: invert(make(), torch.tensor([0, 1]), shape=SHAPE, steps=1),
}
CALLS |= {
    f"of users: {name}": lambda make, call=call: call(KeepInit(make), make().eval(), data())  # type: ignore[misc]
    for name, call in COMPONENTS.items()
}


@pytest.mark.parametrize("network", MODERN)
@pytest.mark.parametrize("component", CALLS)
def test_every_component_accepts_a_modern_network(component: str, network: str) -> None:
    made = CALLS[component](MODERN[network])
    assert made is not None
    if isinstance(made, LabeledImages):
        assert torch.isfinite(made.images).all()


@pytest.mark.parametrize("network", MODERN)
def test_authors_initialization_is_kept_and_depends_on_the_seed(network: str, global_rng_untouched: None) -> None:
    make = MODERN[network]
    refused(lambda: RandomNetworks(make), TypeError, r"cannot redraw .* KeepInit\(factory\)")
    one, two = RandomNetworks(KeepInit(make)), RandomNetworks(KeepInit(make))
    generator = derive(5)
    first, second = weights(one.draw(generator)), weights(one.draw(generator))
    assert torch.equal(first, weights(two.draw(derive(5))))
    assert not torch.equal(first, weights(two.draw(derive(6))))
    assert not torch.equal(first, second)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own = weights(make())
    assert float(first.std()) == pytest.approx(float(own.std()), rel=0.15)


def test_users_redraw_draws_the_rest() -> None:
    def redraw(network: nn.Module, generator: torch.Generator) -> None:
        network.get_parameter("class_token").normal_(generator=generator)
        network.get_parameter("encoder.pos_embedding").normal_(std=0.02, generator=generator)

    networks = RandomNetworks(vit, redraw)
    tokens = [dict(networks.draw(derive(i)).model.named_parameters())["class_token"].clone() for i in (0, 1, 0)]  # type: ignore[attr-defined]
    assert torch.equal(tokens[0], tokens[2])
    assert not torch.equal(tokens[0], tokens[1])
    made = distribution_matching(data(), networks=networks, ipc=1, steps=2)
    assert torch.isfinite(made.images).all()


def test_parameters_that_redraw_skips_keep_the_factorys_values() -> None:
    class Scaled(ConvNet):
        def __init__(self) -> None:
            super().__init__(SHAPE, CLASSES, width=4, depth=1)
            self.scale = nn.Parameter(torch.full((1,), 0.25))

    networks = RandomNetworks(Scaled, lambda network, generator: network.get_parameter("scale").mul_(2))
    assert [float(networks.draw(derive(i)).scale) for i in range(3)] == [1.0] * 3  # type: ignore[attr-defined]


def test_pretrained_networks_are_fixed() -> None:
    pretrained = build(lambda: ConvNet(SHAPE, CLASSES, width=4, depth=1), 3)

    def load() -> nn.Module:
        network = ConvNet(SHAPE, CLASSES, width=4, depth=1)
        network.load_state_dict(pretrained.state_dict())
        return network

    assert torch.equal(weights(build(KeepInit(load), 0)), weights(pretrained))
    assert not torch.equal(weights(build(load, 0)), weights(pretrained))
    with pytest.raises(ValueError, match=r"two draws are equal; for one trained network use FixedNetwork\(network\)"):
        RandomNetworks(KeepInit(load))
    found = evaluate(data(), data(), KeepInit(load), num_networks=1, protocol=Protocol(epochs=1, batch=6, lr=1e-12))
    assert found.accuracy == accuracy(pretrained, data())


def test_second_derivative_of_attention_equals_that_of_its_formula() -> None:
    """Fused attention against finite differences, in one chunk and in two."""
    net = build(KeepInit(vit), 0).double().eval()
    own = list(net.parameters())
    x = torch.rand(2, *SHAPE, generator=derive(1)).double()
    y = torch.tensor([0, 2])
    target = [torch.randn(p.shape, generator=derive(2)).double() for p in own]
    distance, gradient = distance_to_target(net, own, x, y, target, metric="mse")  # type: ignore[arg-type]
    again, cut = distance_to_target(net, own, x, y, target, metric="mse", chunk=1)  # type: ignore[arg-type]
    torch.testing.assert_close((again, cut), (distance, gradient))
    way, eps = torch.randn(x.shape, generator=derive(3)).double(), 1e-5

    def value(images: torch.Tensor) -> float:
        got = parameter_gradient(net, own, images, y)  # type: ignore[arg-type]
        return float(sum((g - t).square().sum() for g, t in zip(got, target, strict=True)))

    slope = (value(x + eps * way) - value(x - eps * way)) / (2 * eps)
    ratio = float((gradient * way).sum()) / slope
    assert ratio == pytest.approx(float(distance) / value(x), rel=1e-4)


def sized(classes: int = CLASSES, shape: tuple[int, int, int] = SHAPE) -> nn.Module:
    return build(lambda: ConvNet(shape, classes, width=4, depth=1), 0)


@pytest.mark.filterwarnings("error")
def test_training_a_network_with_global_draws_is_warned_of() -> None:
    from torchvision.ops import StochasticDepth

    class Deep(nn.Sequential):
        """With stochastic depth, the default of Swin and ConvNeXt."""

    def make(share: float) -> nn.Module:
        return Deep(nn.Conv2d(3, 3, 3), StochasticDepth(share, "row"), nn.Flatten(), nn.Linear(588, CLASSES))

    with pytest.warns(UserWarning, match="Deep draws from PyTorch's global random state while it is trained"):
        train(build(lambda: make(0.5), 0), data(), Protocol(epochs=1, schedule="constant"))
    train(build(lambda: make(0.0), 0), data(), Protocol(epochs=1))


LOGARITHMS = FixedNetwork(nn.Sequential(nn.Flatten(), nn.Linear(768, 3), nn.LogSoftmax(1)))
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a module as networks": (
        lambda: distribution_matching(data(), networks=sized()),  # type: ignore[arg-type]
        TypeError,
        r"networks must be a network sampler.*this ConvNet pass FixedNetwork\(network\)",
    ),
    "a sampler without the attribute fixed": (
        lambda: distribution_matching(data(), networks=SimpleNamespace(draw=lambda generator: sized())),  # type: ignore[arg-type]
        TypeError,
        "networks must be a network sampler; SimpleNamespace lacks the attribute fixed",
    ),
    "a class that wants arguments": (
        lambda: RandomNetworks(ConvNet),
        TypeError,
        r"factory is called as factory\(\); give lambda: ConvNet.*, got ConvNet, which takes \(shape",
    ),
    "a function with one argument that must be given": (
        lambda: RandomNetworks(lambda width, height=8, *rest, **more: sized()),  # type: ignore[misc]
        TypeError,
        r"factory is called as factory\(\); give .*, which takes \(width, height=8, \*rest, \*\*more\)$",
    ),
    "a module among factories": (
        lambda: evaluate(data(), data(), {"net": sized()}, num_networks=1),
        TypeError,
        r"factory\['net'\] must be a function",
    ),
    "too many outputs": (
        lambda: evaluate(data(), data(), lambda: sized(5), num_networks=1),
        ValueError,
        "must return 3 logits.*returns 5; build it for 3 classes, or pass num_classes=5 for the data$",
    ),
    "other classes where logits are matched": (
        lambda: distribution_matching(data(), networks=FixedNetwork(sized(5)), ipc=1, match="embedding+logits"),
        ValueError,
        "networks must return 3 logits.*returns 5",
    ),
    "maps for logits": (
        lambda: accuracy(nn.Conv2d(3, 3, 3), data()),
        ValueError,
        r"network must return logits \[N, K\], but returns \[2, 3, 14, 14\] for 2 images of shape \(3, 16, 16\)",
    ),
    "NaN weights": (
        lambda: train(
            sized().requires_grad_(False).apply(lambda m: [p.fill_(torch.nan) for p in m.parameters()]), data()
        ),
        ValueError,
        "returns NaN or Inf for noise",
    ),
    "another dtype": (
        lambda: train(sized().double(), data()),
        ValueError,
        r"must have the dtype and device of the images.*\.to\(device",
    ),
    "logits that are not the classifier's": (
        lambda: distribution_matching(data(), networks=LOGARITHMS, ipc=1, match="embedding+logits"),
        ValueError,
        "networks's logits must be the output of its classifier",
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_incompatible_network_is_refused_before_the_call(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    refused(call, error, words)


def test_network_for_other_classes_is_accepted_for_embeddings() -> None:
    made = distribution_matching(data(), networks=FixedNetwork(sized(1000)), ipc=1, steps=1)
    assert made.num_classes == CLASSES
