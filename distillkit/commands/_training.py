"""Networks that commands build and train, and the options for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
from torch import nn

from distillkit.augment import DSA, Augmentation
from distillkit.networks import NETWORK_NAMES, build, named_network
from distillkit.rng import derive
from distillkit.sets import LabeledImages, StoredImages
from distillkit.training import Protocol, train

_WIDTH = 64


@dataclass(frozen=True)
class Networks:
    """Options of the networks of a command, and of the randomness and device with which it uses them."""

    network: str
    width: int | None
    depth: int | None
    augment: str
    device: str
    seed: int

    def factory(self, like: Any) -> Callable[[], nn.Module]:
        """Return a function that makes an untrained network for the images of a set."""
        return partial(named_network, self.network, like.shape, like.num_classes, **self.options())

    def options(self) -> dict[str, int]:
        """Return the options of the named network."""
        width = _WIDTH if self.network == "convnet" and self.width is None else self.width
        return {name: value for name, value in (("width", width), ("depth", self.depth)) if value is not None}

    def augmentation(self) -> Augmentation | None:
        """Return the augmentation of real, synthetic and training images."""
        return DSA() if self.augment == "dsa" else None

    def trained(self, real: LabeledImages | StoredImages, epochs: int, *, progress: bool) -> nn.Module:
        """Return a network that was trained on real images."""
        network = build(self.factory(real), derive(self.seed, "network"))
        protocol = Protocol(epochs=epochs, batch=64, augment=self.augmentation())
        order = derive(self.seed, "train")
        train(network, real, protocol, generator=order, device=self.device, progress=progress)
        return network


_OPTIONS = {
    "network": click.option("--network", type=click.Choice(NETWORK_NAMES), default="convnet", show_default=True),
    "width": click.option("--width", type=click.IntRange(1), help="Width; default of a convnet: 64 (papers: 128)."),
    "depth": click.option("--depth", type=click.IntRange(1), help="Depth of a convnet."),
    "augment": click.option(
        "--augment", type=click.Choice(["none", "dsa"]), default="none", show_default=True,
        help="dsa: flips, crops, colors; for photographs.",
    ),
    "device": click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto."),
    "seed": click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
}  # fmt: skip


def network_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `Networks` to a command, which gets them as `networks`."""

    @functools.wraps(command)
    def make(**options: Any) -> Any:
        own = {name: options.pop(name) for name in _OPTIONS}
        return command(networks=Networks(**own), **options)

    for option in reversed(_OPTIONS.values()):
        make = option(make)
    return make
