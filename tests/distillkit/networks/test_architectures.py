"""Properties of every built-in network for all norms, channels and classes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from distillkit.networks import (
    NETWORK_NAMES,
    CifarResNet,
    ConvNet,
    FedCOGCNN,
    ImageNetwork,
    LeNet,
    ResNet,
    SimpleCNN,
    WideResNet,
    build,
    initialize,
    named_network,
    split,
)

Make = Callable[[str], nn.Module]
SHAPE = (5, 22, 23)

SMALL: dict[str, Make] = {
    "convnet": lambda norm: ConvNet(SHAPE, 2, width=4, norm=norm),
    "fedcog_cnn": lambda norm: FedCOGCNN(SHAPE, 2, norm=norm),
    "lenet": lambda norm: LeNet(SHAPE, 2, norm=norm),
    "simple_cnn": lambda norm: SimpleCNN(SHAPE, 2, norm=norm),
    "resnet8": lambda norm: CifarResNet(SHAPE, 2, depth=8, width=4, norm=norm),
    "resnet10": lambda norm: ResNet(SHAPE, 2, depth=10, width=2, norm=norm),
    "resnet50": lambda norm: ResNet(SHAPE, 2, depth=50, width=2, norm=norm),
    "wrn10_1": lambda norm: WideResNet(SHAPE, 2, depth=10, width=1, norm=norm),
}
NORMS = ("batch", "group", "instance", "layer", "none")


def small(name: str, norm: str) -> ImageNetwork:
    make = SMALL[name]
    net = build(lambda: make(norm), 3)
    assert isinstance(net, ImageNetwork)
    return net


def images(count: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(count, *SHAPE, dtype=dtype).normal_(generator=torch.Generator().manual_seed(1))


every = pytest.mark.parametrize(("name", "norm"), list(itertools.product(SMALL, NORMS)))


@every
def test_forward_equals_classifier_of_features(name: str, norm: str) -> None:
    net = small(name, norm).eval()
    embedding = net.features(images())
    logits = net(images())
    assert embedding.shape == (3, net.embedding_dim)
    assert logits.shape == (3, 2)
    assert torch.isfinite(logits).all()
    assert torch.equal(net.classifier(embedding), logits)
    assert split(net) is net
    assert (embedding[0] - embedding[1]).norm() > 1e-4 * embedding.norm()


@every
def test_memory_format_changes_nothing(name: str, norm: str) -> None:
    net = small(name, norm).double()
    plain = net(images(dtype=torch.float64))
    last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    for model in (net, last):
        x = images(dtype=torch.float64).to(memory_format=torch.channels_last)
        torch.testing.assert_close(model(x), plain)


@every
def test_float64_stays_float64_and_agrees_with_float32(name: str, norm: str) -> None:
    net = small(name, norm)
    twin = copy.deepcopy(net).double()
    double = twin(images().double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(net(images()).double(), double, rtol=1e-3, atol=1e-4)


@every
def test_second_derivatives_equal_finite_differences(name: str, norm: str) -> None:
    """d/dx |dL/dw|^2, what gradient matching needs, against a central difference along one direction."""
    net = small(name, norm).double()
    labels = torch.tensor([0, 1, 0])
    x = images(dtype=torch.float64)
    direction = torch.empty(x.shape, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(2))

    def squared_gradient(x: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(net(x), labels)
        gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum()

    x.requires_grad_()
    slope = (torch.autograd.grad(squared_gradient(x), x)[0] * direction).sum()
    step = 1e-8  # small, for the gradient of a ReLU network jumps
    forth, back = (squared_gradient((x + sign * step * direction).detach()).detach() for sign in (1, -1))
    torch.testing.assert_close(slope, (forth - back) / (2 * step), rtol=1e-4, atol=1e-9)


@every
def test_layers_overwrite_no_needed_tensors(name: str, norm: str) -> None:
    """With a graph, tensors kept by hooks are unchanged; without one, outputs and images are unchanged."""
    net = small(name, norm)
    x, kept = images(), list[tuple[Tensor, Tensor]]()
    handles = [
        module.register_forward_hook(lambda _, inputs, y: kept.extend((t, t.clone()) for t in (inputs[0], y)))
        for module in net.modules()
        if not list(module.children())
    ]
    logits = net(x)
    assert kept
    assert all(torch.equal(now, then) for now, then in kept)
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        assert torch.equal(net(x), logits)
    assert torch.equal(x, images())


@pytest.mark.parametrize("norm", ["group", "instance", "layer", "none"])
def test_second_derivatives_agree_in_all_differentiation_modes(norm: str) -> None:
    """Forward over reverse and reverse over reverse mode; torch's own instance norm fails in one of them."""
    net = build(lambda: ConvNet((2, 8, 8), 2, width=4, depth=2, norm=norm, activation="silu"), 0).double()
    x, v = torch.empty(2, 2, 2, 8, 8, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(0))

    def loss(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(x), torch.tensor([0, 1]))

    twice_back = torch.func.vjp(torch.func.grad(loss), x)[1](v)[0]
    forward_over_reverse = torch.func.jvp(torch.func.grad(loss), (x,), (v,))[1]
    reverse_over_forward = torch.func.grad(lambda x: torch.func.jvp(loss, (x,), (v,))[1])(x)
    torch.testing.assert_close(forward_over_reverse, twice_back)
    torch.testing.assert_close(reverse_over_forward, twice_back)


@every
def test_constructor_draws_the_same_weights_as_initialize(name: str, norm: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        constructed = SMALL[name](norm)
    drawn = initialize(small(name, norm), torch.Generator().manual_seed(5))
    for (key, a), b in zip(constructed.state_dict().items(), drawn.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@every
def test_opacus_finds_the_gradients_of_each_image_or_refuses_batch_norm(name: str, norm: str) -> None:
    net = small(name, norm).double()
    errors = ModuleValidator.validate(net.train())
    assert all("BatchNorm" in str(error) for error in errors)
    assert bool(errors) == (norm == "batch")
    if errors:
        return
    x, labels = images(dtype=torch.float64), torch.tensor([1, 0, 1])
    loop = [
        torch.autograd.grad(nn.functional.cross_entropy(net(x[i : i + 1]), labels[i : i + 1]), net.parameters())
        for i in range(3)
    ]
    wrapped = GradSampleModule(net, loss_reduction="sum")
    with torch.no_grad():
        assert torch.equal(split(wrapped).features(x), net.features(x))
    nn.functional.cross_entropy(wrapped(x), labels, reduction="sum").backward()
    for parameter, *gradients in zip(net.parameters(), *loop, strict=True):
        torch.testing.assert_close(parameter.grad_sample, torch.stack(gradients))


def test_only_batch_norm_mixes_images() -> None:
    for name, norm in itertools.product(SMALL, NORMS):
        net = small(name, norm).double().train()
        x = images(dtype=torch.float64)
        together, alone = net(x), torch.cat([net(x[i : i + 1]) for i in range(3)])
        assert torch.allclose(together, alone, rtol=1e-9, atol=1e-12) == (norm != "batch"), (name, norm)


@pytest.mark.parametrize("make", [ConvNet, SimpleCNN, LeNet, FedCOGCNN, ResNet, CifarResNet, WideResNet])
@pytest.mark.parametrize("groups", [1, 2])
def test_number_of_groups_reaches_every_norm(make: type[ConvNet], groups: int) -> None:
    with torch.device("meta"):
        norms = [m for m in make((3, 32, 32), 2, norm="group", groups=groups).modules() if isinstance(m, nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {groups}


@pytest.mark.parametrize("name", NETWORK_NAMES)
def test_networks_are_built_by_name(name: str) -> None:
    with torch.device("meta"):
        net = named_network(name, (3, 32, 32), 7, norm="group")
        assert net(torch.empty(2, 3, 32, 32)).shape == (2, 7)
    assert any(isinstance(module, nn.GroupNorm) for module in net.modules())
    assert all(parameter.is_meta for parameter in net.parameters())
    assert getattr(net, "chunked_stem", False) == isinstance(net, ConvNet)


def test_names_denote_the_published_networks() -> None:
    with torch.device("meta"):
        counts = {
            name: sum(parameter.numel() for parameter in named_network(name, (3, 32, 32), 10).parameters())
            for name in NETWORK_NAMES
        }
    assert counts == {
        "convnet": 320_010,
        "fedcog_cnn": 69_380 - 90 * 129,
        "lenet": 62_006,
        "resnet8": 78_042,
        "resnet10": 4_903_242,
        "resnet18": 11_173_962,
        "resnet20": 272_474,
        "resnet34": 21_282_122,
        "resnet50": 23_520_842,
        "simple_cnn": 62_006,
        "wrn16_4": 2_748_890,
    }
