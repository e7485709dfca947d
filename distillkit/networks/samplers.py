"""Network samplers, which supply a network for each step of distribution or gradient matching."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.configurable import Configurable
from distillkit.networks._base import Network, split
from distillkit.networks._factory import NetworkFactory, build, frozen_copy, keeps_init
from distillkit.networks._initialization import Redraw, initialize
from distillkit.rng import as_generator, derive


class NetworkSampler(Protocol):
    """Interface of network samplers, from which a condensation draws a network in every step.

    Any object with the attribute `fixed` and the method `draw` is a sampler.

    Attributes:
        fixed: whether every draw returns the same network, so that results computed with it can be cached.
    """

    fixed: bool

    def draw(self, generator: torch.Generator) -> Network:
        """Return the network for the next step, with frozen parameters.

        Use the network only until the next draw, which may overwrite it in place.

        Args:
            generator: source of randomness, which alone must determine the network. A condensation passes a generator
                that is derived from its seed and the step, so a resumed run uses the same networks as an uninterrupted
                one.
        """
        ...


class RandomNetworks(Configurable):
    """Sampler that returns a newly initialized, untrained network in every draw, as in DM, DC and DSA.

    One network is created, and every draw reinitializes it in place with `networks.initialize`. The network is in eval
    mode, except that batch norm uses batch statistics, because an untrained network has no useful running statistics.
    The authors' code uses training mode for all layers. This makes a difference only for dropout, which would draw from
    the global random state.

    Paper: Zhao and Bilen, "Dataset condensation with distribution matching" (WACV 2023).

    Args:
        factory: function without arguments that returns a network with the device and dtype of the images. The
            network's weights are overwritten. If the factory is a `KeepInit`, every draw instead creates a new network,
            and keeps the initialization of its constructor, for example for vision transformers.
        redraw: function `redraw(network, generator)` that sets parameters for which `initialize` has no rule. It is
            called with gradients disabled. A parameter that neither `initialize` nor `redraw` sets keeps its value from
            the factory.

    Attributes:
        factory, redraw: the values of the arguments.

    Raises:
        TypeError: `factory` is a network, requires arguments, does not return a network, or returns one that
            `initialize` cannot redraw.
        ValueError: two generators in different states give equal networks, or two generators in the same state give
            different networks.
    """

    fixed = False

    def __init__(self, factory: NetworkFactory, redraw: Redraw | None = None) -> None:
        if isinstance(factory, nn.Module):
            raise TypeError(
                f"factory must be a function without arguments that returns an nn.Module, got a "
                f"{type(factory).__name__}; for one trained network use FixedNetwork(network)"
            )
        if redraw is not None and not callable(redraw):
            raise TypeError(f"redraw must be a function of (network, generator), got {type(redraw).__name__}")
        self.factory, self.redraw = factory, redraw
        self._current = build(factory, 0, redraw)
        self._initial = {} if redraw is None else {n: p.detach().clone() for n, p in self._current.named_parameters()}
        self._use(self._current)
        first, other, again = (self._weights(seed) for seed in (0, 1, 0))
        if len(first) and torch.equal(first, other):
            raise ValueError(
                "factory must return networks that differ by seed, but two draws are equal; "
                "for one trained network use FixedNetwork(network)"
            )
        if not torch.equal(first, again):
            raise ValueError(
                "factory and redraw must draw from the generator alone, but equal generators gave different networks"
            )

    def draw(self, generator: torch.Generator) -> Network:
        """Redraw the parameters of the network in place, and return the network.

        Args:
            generator: source of randomness; see `NetworkSampler.draw`.
        """
        if keeps_init(self._current):
            self._use(build(self.factory, generator, self.redraw))
            return self._network
        with torch.no_grad():
            for name, parameter in self._current.named_parameters() if self._initial else ():
                parameter.copy_(self._initial[name])
        initialize(self._current, generator, self.redraw)
        return self._network

    def _use(self, network: nn.Module) -> None:
        self._current = network.requires_grad_(False).eval()
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()
        self._network = split(network)

    def _weights(self, seed: int) -> Tensor:
        self.draw(derive(seed, "trial"))
        return torch.cat([p.flatten() for p in self._current.parameters()] or [torch.empty(0)]).clone()

    def __repr__(self) -> str:
        kind = type(self._current).__name__
        return f"RandomNetworks({f'KeepInit({kind})' if keeps_init(self._current) else kind})"


class FixedNetwork(Configurable):
    """Sampler that always returns the same network, frozen in eval mode, as in FedLGD's distribution matching.

    In eval mode, batch norm uses the running statistics of `network`, as in the authors' code.

    Paper: Huang et al., "Federated learning on virtual heterogeneous data with local-global dataset distillation"
    (FedLGD, TMLR 2024), section 3.3.1.

    Args:
        network: any `nn.Module`. It is copied, so later changes to it have no effect.
        cache: whether distribution matching may compute the mean embedding of all real images of each class once, and
            reuse it in every step. This removes sampling noise at almost no cost. The paper samples a random batch of
            real images in each step; pass False to do the same.
    """

    def __init__(self, network: nn.Module, *, cache: bool = True) -> None:
        self.fixed = self.cache = check.boolean(cache, "cache")
        self._copy = frozen_copy(network).eval()
        self._network = split(self._copy)

    def init_arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the constructor arguments that recreate this sampler.

        The argument `network` is the copy that the sampler made, because the original may have been trained further.
        """
        return (self._copy,), {} if self.cache else {"cache": False}

    def draw(self, generator: torch.Generator) -> Network:
        """Return the network, which is the same in every step.

        Args:
            generator: ignored.
        """
        return self._network

    def __repr__(self) -> str:
        return f"FixedNetwork({type(self._network).__name__})"


class NetworkBall(Configurable):
    """Sampler of random networks whose parameters have the distance `radius` from those of `network` (FedDM).

    Let w_r be the vector of all P parameters of `network`, rho the radius, and eps ~ N(0, I) a random vector of length
    P. A draw has the parameters w = w_r + rho * eps / ||eps||, so **every draw is on the sphere** around w_r. The paper
    instead clips w_r + eps to the ball of radius rho. The result is the same in practice: ||eps|| is about sqrt(P),
    which is 566 for the 320,010 parameters of ConvNet and much larger than rho = 5, so the clip applies to every draw.
    The results would differ only for networks of fewer than about rho^2 = 25 parameters. Each parameter changes by
    about rho / sqrt(P), which is 0.009 for ConvNet. Buffers, such as running statistics, are those of `network`, and
    the networks are in eval mode.

    Paper: Xiong et al., "FedDM: iterative distribution matching for communication-efficient federated learning" (CVPR
    2023), section 3.2 and Eq. 15.

    Args:
        network: network at the center, w_r; it is not changed.
        radius: radius of the ball, rho > 0, the L2 distance between parameter vectors. The paper uses 5.
    """

    fixed = False

    def __init__(self, network: nn.Module, radius: float) -> None:
        self.radius = check.real_number(radius, "radius", above=0.0, most=1e30)
        self._copy = frozen_copy(network).eval()
        self._network = split(self._copy)
        self._parameters = list(self._copy.parameters())
        if not self._parameters:
            raise ValueError(f"network must have parameters, but {type(network).__name__} has none")
        self._center = [p.detach().clone() for p in self._parameters]
        self._sizes = [p.numel() for p in self._parameters]

    def init_arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the constructor arguments that recreate this sampler.

        The first argument is a copy of the network, with the parameters at the center of the ball. The sampler's own
        network cannot be used, because draws overwrite its parameters.
        """
        center = copy.deepcopy(self._copy)
        with torch.no_grad():
            for parameter, value in zip(center.parameters(), self._center, strict=True):
                parameter.copy_(value)
        return (center, self.radius), {}

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> Network:
        """Set the parameters in place to a random point at distance `radius` from the center, and return the network.

        Args:
            generator: source of randomness; see `NetworkSampler.draw`.
        """
        first = self._center[0]
        noise = torch.empty(sum(self._sizes), dtype=first.dtype).normal_(generator=as_generator(generator))
        noise = (noise * (self.radius / noise.norm())).to(first.device, non_blocking=True)
        for parameter, center, move in zip(self._parameters, self._center, noise.split(self._sizes), strict=True):
            torch.add(center, move.view_as(center), out=parameter)
        return self._network

    def __repr__(self) -> str:
        return f"NetworkBall({type(self._network).__name__}, radius={self.radius:g})"
