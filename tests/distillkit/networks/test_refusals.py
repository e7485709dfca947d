"""Every refusal of networks, samplers and the checks of a user's network, with its message, as in `refusals.txt`.

`python -m tests.distillkit.networks.test_refusals` writes the list; its difference shows what changes for users.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor, nn

from distillkit import networks as nets
from distillkit.networks._validation import check_network, require_sampler

LIST = Path(__file__).with_name("refusals.txt")
SMALL, PLAIN, IMAGES = (1, 8, 8), (3, 32, 32), torch.zeros(2, 1, 8, 8)


def net(**options: Any) -> nets.ConvNet:
    return nets.ConvNet(SMALL, 3, width=2, depth=1, **options)


class Twice(nn.Module):
    """A network whose head runs twice, with a parameter that no rule draws."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(8, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.head(-x)


class Bare(nn.Module):
    """A network without parameters, whose features are a given function."""

    def __init__(self, features: Callable[[Tensor], Any], classifier: nn.Module | None = None) -> None:
        super().__init__()
        self.classifier, self._features = classifier or nn.Identity(), features

    def features(self, images: Tensor) -> Any:
        return self._features(images)

    def forward(self, images: Tensor) -> Any:
        return self.classifier(self.features(images))


def fails(x: Tensor) -> Tensor:
    raise RuntimeError


flat, LOGARITHMS = nn.Flatten(), nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.LogSoftmax(1))
FIXED, COUNT, CIFAR = net(), iter(range(100)), (nets.CifarResNet, nets.WideResNet)
OPTIONS: list[tuple[Callable[..., nn.Module], Any, dict[str, Any]]] = [
    *((nets.ConvNet, shape, {}) for shape in ((3, 8, 8), (3, 7, 32), (3, 32, 7), (32, 32), (0, 32, 32))),
    *(
        (nets.ConvNet, PLAIN, odd)
        for odd in ({"num_classes": 1}, {"pooling": "sum"}, {"activation": "gelu"}, {"depth": 0})
    ),
    *((make, PLAIN, {"width": 0}) for make in (nets.ConvNet, nets.ResNet, *CIFAR)),
    *((make, PLAIN, {"norm": "group", "groups": 5}) for make in (nets.ConvNet, nets.LeNet, nets.ResNet)),
    *((make, PLAIN, odd) for make in CIFAR for odd in ({"init": "a"}, {"depth": 2}, {"depth": 18})),
    *((make, (1, 4, 4), {"norm": "instance"}) for make in (nets.ResNet, *CIFAR)),
    *(
        (nets.ResNet, SMALL, {"norm": "instance"}),
        *((nets.ConvNet, (3, 1, side), {"pooling": "none"}) for side in (1, 2)),
        (nets.ResNet, PLAIN, {"depth": 20}),
    ),
    *((make, (1, *sides), {}) for make in (nets.SimpleCNN, nets.LeNet) for sides in ((15, 16), (16, 15))),
    *((nets.FedCOGCNN, (1, *sides), {}) for sides in ((21, 22), (22, 21))),
    *((nets.LeNet, SMALL, odd) for odd in ({"pooling": "none"}, {}, {"shape": (1, 28, 28), "activation": "gelu"})),
    (nets.SimpleCNN, PLAIN, {"norm": "rms"}),
]
CALLS: dict[str, Callable[[], Any]] = {
    **{
        f"{make.__name__}({shape}, {odd})": lambda make=make, shape=shape, odd=odd: make(  # type: ignore[misc]
            **{"shape": shape, "num_classes": 3, **odd}
        )
        for make, shape, odd in OPTIONS
    },
    **{
        f"{type(made).__name__} of {list(shape)}": lambda made=made, shape=shape: made(torch.zeros(shape))  # type: ignore[misc]
        for made, shapes in (
            (net(), ((2, 3, 8, 8), (2, 1, 8, 9), (1, 8, 8))),
            (nets.CifarResNet(PLAIN, 2, depth=8), ((2, 1, 32, 32), (3, 32, 32), (2, 3, 3, 32, 32))),
        )
        for shape in shapes
    },
    "images of another dtype": lambda: net()(IMAGES.double()),
    "norm_layer channels": lambda: nets.norm_layer("batch", 0),
    "norm_layer groups": lambda: nets.norm_layer("none", 4, groups=0),
    "named_network name": lambda: nets.named_network("vgg", PLAIN, 10),
    "named_network fixed": lambda: nets.named_network("wrn16_4", PLAIN, 10, width=3, depth=34),
    "named_network unknown": lambda: nets.named_network("resnet10", PLAIN, 10, dilation=2, cut=3),
    "split function": lambda: nets.split(flat),  # type: ignore[arg-type]
    "split class": lambda: nets.split(nets.ConvNet),  # type: ignore[arg-type]
    "split without linear": lambda: nets.split(nn.Sequential(nn.Flatten())),
    **{f"split {odd!r}": lambda odd=odd: nets.split(Twice(), odd) for odd in ("body", "", 3)},  # type: ignore[misc]
    "split twice": lambda: nets.split(Twice(), "head").features(torch.ones(2, 8)),
    "initialize number": lambda: nets.initialize(3, 0),  # type: ignore[arg-type]
    "initialize lazy": lambda: nets.initialize(nn.Sequential(nn.LazyLinear(3)), 0),
    "initialize unknown": lambda: nets.initialize(Twice(), 0),
    "initialize unknown inside": lambda: nets.initialize(nn.ModuleDict({"in": nn.Sequential(nn.ReLU(), Twice())}), 0),
    "initialize redraw": lambda: nets.initialize(net(), 0, 3),  # type: ignore[arg-type]
    "build network": lambda: nets.build(net(), 0),
    "build number": lambda: nets.build(3, 0),  # type: ignore[arg-type]
    "build a number": lambda: nets.build(lambda: 3, 0),  # type: ignore[arg-type, return-value]
    "build arguments": lambda: nets.build(lambda width, height=8, *rest, **more: net(), 0),  # type: ignore[misc]
    "build arguments kept": lambda: nets.build(nets.KeepInit(lambda width: net()), 0),  # type: ignore[misc]
    "frozen_copy lazy": lambda: nets.frozen_copy(nn.LazyLinear(3)),
    "build lazy": lambda: nets.build(lambda: nn.LazyLinear(3), 0),
    "KeepInit network": lambda: nets.KeepInit(net()),
    "RandomNetworks network": lambda: nets.RandomNetworks(net()),
    "RandomNetworks redraw": lambda: nets.RandomNetworks(net, 3),  # type: ignore[arg-type]
    "RandomNetworks fixed": lambda: nets.RandomNetworks(nets.KeepInit(lambda: FIXED)),
    "RandomNetworks counts": lambda: nets.RandomNetworks(net, lambda n, _: n.classifier.bias.fill_(float(next(COUNT)))),  # type: ignore[union-attr, operator]
    "FixedNetwork cache": lambda: nets.FixedNetwork(net(), cache=1),  # type: ignore[arg-type]
    "NetworkBall least": lambda: nets.NetworkBall(net(), 0),
    "NetworkBall most": lambda: nets.NetworkBall(net(), 1e31),
    "NetworkBall empty": lambda: nets.NetworkBall(Bare(flat), 1.0),
    "require_sampler network": lambda: require_sampler(net()),
    "require_sampler class": lambda: require_sampler(nets.FixedNetwork),
    "require_sampler factory": lambda: require_sampler(net, "these"),
    "require_sampler not fixed": lambda: require_sampler(SimpleNamespace(draw=net)),
    "require_sampler fixed number": lambda: require_sampler(SimpleNamespace(draw=net, fixed=1)),
    **{
        f"check_network {name}": lambda network=network, options=options: check_network(  # type: ignore[misc]
            network, IMAGES, **{"classes": 64, **options}
        )
        for name, network, options in (
            ("failing", Bare(fails), {}),
            ("index", Bare(lambda x: x[:, :, 9]), {"name": "it"}),
            ("in place", Bare(lambda x: flat(x.mul_(2))), {}),
            ("maps", Bare(lambda x: x, nn.Flatten()), {"features": True}),
            ("long", Bare(lambda x: flat(x).long()), {"features": True, "name": "it"}),
            ("list", Bare(lambda x: [x]), {}),
            ("one row", Bare(lambda x: flat(x)[:1]), {"name": "it"}),
            ("NaN", Bare(lambda x: flat(x) * torch.nan), {}),
            ("classes", Bare(flat), {"classes": 3}),
            ("more classes", Bare(flat), {"classes": 63, "more": True, "features": True}),
            ("fewer classes", Bare(flat), {"classes": 65, "more": True}),
            ("softmax", Bare(flat, nn.Softmax(1)), {"probabilities": "refuse"}),
            ("softmax accepted", Bare(flat, nn.Softmax(1)), {"probabilities": "accept"}),
            ("log softmax", LOGARITHMS, {"classes": 3}),
            ("log softmax classifier", nets.split(LOGARITHMS), {"classes": 3, "features": True}),
            ("silent", Mock(return_value=flat(IMAGES), features=flat, classifier=id), {"features": True}),
            ("dtype", net().double(), {"classes": 3}),
        )
    },
}


def outcome(name: str) -> str:
    """Return one line: the name of a call, and the error that it raises."""
    try:
        CALLS[name]()
    except (TypeError, ValueError) as error:
        return f"{name}: {type(error).__name__}: {error}"
    return f"{name}: accepted"


def test_outcomes_are_as_listed() -> None:
    assert [outcome(name) for name in CALLS] == LIST.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    LIST.write_text("".join(f"{outcome(name)}\n" for name in CALLS), encoding="utf-8")
