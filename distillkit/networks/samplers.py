"""Where distribution and gradient matching get their networks from."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.configurable import Configurable
from distillkit.networks._base import Network, split
from distillkit.networks._factory import NetworkFactory, Redraw, build, frozen_copy, initialize, keeps_init
from distillkit.rng import derive

__all__ = [
    "FixedNetwork",
    "NetworkBall",
    "NetworkSampler",
    "RandomNetworks",
]


class NetworkSampler(Protocol):
    """Where a condensation gets its networks from: it asks for one at every step.

    Any object with these two members is one.

    Attributes:
        fixed: whether every draw is the same network, so that what was computed with it may be kept.
    """

    fixed: bool

    def draw(self, generator: torch.Generator) -> Network:
        """The network of the next step, its parameters frozen.

        It is valid until the next draw, which may overwrite it in place.

        Args:
            generator: what the network is a pure function of. Components pass one that is derived from (seed, step), so
                a resumed run sees the networks that an uninterrupted one sees.
        """
        ...


class RandomNetworks(Configurable):
    """Untrained networks, a fresh one for every draw: the networks of DM, DC and DSA.

    One network is built and re-drawn in place (`networks.initialize`), which costs a thousandth of a step. It is in
    eval mode except for batch norm, which uses the batch's statistics: a network that was never trained has no
    running ones. (The authors' code uses training mode throughout; that differs for dropout only, which would draw
    from the global random state.)

    Paper: Zhao and Bilen, "Dataset condensation with distribution matching" (WACV 2023).

    Args:
        factory: `factory()` gives a network of any kind, on the device and of the dtype of the images. What it draws
            itself is overwritten, unless it is an `KeepInit(factory)`: then every draw is a new construction, with the
            initialisation that the network's author chose (vision transformers and the like).
        redraw: `redraw(network, generator)` sets the parameters that `initialize` has no rule for; those that it leaves
            keep the values that the factory gave them. It is called without gradients.

    Attributes:
        factory, redraw: as given.

    Raises:
        TypeError: `factory` is a network, wants arguments, gives no network, or one that `initialize` cannot re-draw.
        ValueError: two draws with different generators are the same network, or two with equal ones differ.
    """

    fixed = False

    def __init__(self, factory: NetworkFactory, redraw: Redraw | None = None) -> None:
        if isinstance(factory, nn.Module):
            raise TypeError(
                f"factory must be a function without arguments that returns an nn.Module, but a "
                f"{type(factory).__name__} is one; for one trained network take FixedNetwork(network)"
            )
        if redraw is not None and not callable(redraw):
            raise TypeError(f"redraw must be a function of (network, generator), got {type(redraw).__name__}")
        self.factory, self.redraw = factory, redraw
        self._made = build(factory, 0, redraw)
        self._kept = {} if redraw is None else {n: p.detach().clone() for n, p in self._made.named_parameters()}
        self._ready(self._made)
        first, other, again = (self._weights(seed) for seed in (0, 1, 0))
        if len(first) and torch.equal(first, other):
            raise ValueError(
                f"factory must give another {type(self._made).__name__} with another seed, but two draws are equal; "
                "for one trained network take FixedNetwork(network)"
            )
        if not torch.equal(first, again):
            raise ValueError(
                "factory and redraw must draw from the generator alone, but two equal ones gave two networks"
            )

    def draw(self, generator: torch.Generator) -> Network:
        """Draw the parameters anew, in place.

        Args:
            generator: see `NetworkSampler.draw`.
        """
        if keeps_init(self._made):
            self._ready(build(self.factory, generator, self.redraw))
            return self._network
        with torch.no_grad():
            for name, parameter in self._made.named_parameters() if self._kept else ():
                parameter.copy_(self._kept[name])
        initialize(self._made, generator, self.redraw)
        return self._network

    def _ready(self, network: nn.Module) -> None:
        self._made = network.requires_grad_(False).eval()
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()
        self._network = split(network)

    def _weights(self, seed: int) -> Tensor:
        self.draw(derive(seed, "trial"))
        return torch.cat([p.flatten() for p in self._made.parameters()] or [torch.empty(0)]).clone()

    def __repr__(self) -> str:
        kind = type(self._made).__name__
        return f"RandomNetworks({f'KeepInit({kind})' if keeps_init(self._made) else kind})"


class FixedNetwork(Configurable):
    """Always the same network: a frozen copy of `network` in eval mode (FedLGD's iterative distribution matching).

    Eval mode is what the released code leaves it in; batch norm then uses the running statistics of `network`.

    Paper: Huang et al., "Federated learning on virtual heterogeneous data with local-global dataset distillation"
    (FedLGD, TMLR 2024), section 3.3.1.

    Args:
        network: any `nn.Module`, left untouched; later changes of it do not reach the copy.
    """

    fixed = True

    def __init__(self, network: nn.Module) -> None:
        self._copied = _copied(network)
        self._network = split(self._copied)

    def init_arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The copy of the network that was given: that one may be trained on."""
        return (self._copied,), {}

    def draw(self, generator: torch.Generator) -> Network:
        """The network, the same at every step.

        Args:
            generator: not used.
        """
        return self._network

    def __repr__(self) -> str:
        return f"FixedNetwork({type(self._network).__name__})"


class NetworkBall(Configurable):
    """Networks around `network`, drawn at distance `radius` (FedDM).

    A draw is w = w_r + rho * eps / ||eps||, eps ~ N(0, 1) for each of the P parameters, all of them flattened to one
    vector. The paper clips w_r + eps to the ball of radius rho; but ||eps|| is about sqrt(P) (566 for ConvNet's
    320,010 parameters, against rho = 5), so the clip acts on every draw and **every draw lies on the sphere**. We
    say so in the formula. Only networks of fewer than some rho^2 = 25 parameters would differ. One parameter moves by
    rho / sqrt(P) (0.009 for ConvNet), not by 1. Buffers (running statistics) are the network's; eval mode.

    Paper: Xiong et al., "FedDM: iterative distribution matching for communication-efficient federated learning"
    (CVPR 2023), section 3.2 and Eq. 15.

    Args:
        network: the centre w_r; left untouched.
        radius: rho > 0, in units of the parameters. The paper takes 5.
    """

    fixed = False

    def __init__(self, network: nn.Module, radius: float) -> None:
        self.radius = check.real_number(radius, "radius", above=0.0)
        self._copied = _copied(network)
        self._network = split(self._copied)
        self._parameters = list(self._copied.parameters())
        if not self._parameters:
            raise ValueError(f"network must have parameters, but {type(network).__name__} has none")
        self._center = [p.detach().clone() for p in self._parameters]
        self._sizes = [p.numel() for p in self._parameters]

    def init_arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """A copy of the network that was given, with its weights (those of the last draw are others), and rho."""
        center = copy.deepcopy(self._copied)
        with torch.no_grad():
            for parameter, value in zip(center.parameters(), self._center, strict=True):
                parameter.copy_(value)
        return (center, self.radius), {}

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> Network:
        """Move the parameters to a new point of the sphere, in place.

        Args:
            generator: see `NetworkSampler.draw`.
        """
        first = self._center[0]
        noise = torch.empty(sum(self._sizes), dtype=first.dtype).normal_(generator=generator)
        noise = (noise * (self.radius / noise.norm())).to(first.device)
        for parameter, center, move in zip(self._parameters, self._center, noise.split(self._sizes), strict=True):
            torch.add(center, move.view_as(center), out=parameter)
        return self._network

    def __repr__(self) -> str:
        return f"NetworkBall({type(self._network).__name__}, radius={self.radius:g})"


def _copied(network: nn.Module) -> nn.Module:
    if not isinstance(network, nn.Module):
        came = f"the class {network.__name__}" if isinstance(network, type) else type(network).__name__
        raise TypeError(f"network must be an nn.Module, got {came}; for fresh networks take RandomNetworks(factory)")
    return frozen_copy(network).eval()
