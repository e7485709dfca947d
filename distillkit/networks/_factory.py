"""How networks are made: by a factory, with weights that a seed decides, or that are left as they were made."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distillkit._utils.configurable import Configurable
from distillkit.networks._base import require_network
from distillkit.networks._init import draw_seed, init_own_parameters, seeded_global_rng
from distillkit.rng import as_generator

__all__ = [
    "KeepInit",
    "NetworkFactory",
    "Redraw",
    "build",
    "frozen_copy",
    "initialize",
    "keeps_init",
    "require_factory",
]

NetworkFactory = Callable[[], nn.Module]
Redraw = Callable[[nn.Module, torch.Generator], object]


@torch.no_grad()
def initialize(network: nn.Module, generator: int | torch.Generator, redraw: Redraw | None = None) -> nn.Module:
    """Draw all parameters of a network anew, in place, from a generator alone; return it.

    `RandomNetworks` does so for every draw, `build` once. The distributions are PyTorch's own defaults: Kaiming uniform
    with a = sqrt(5) for linear and convolution weights, uniform +-1/sqrt(fan_in) for their biases, N(0, 1) for
    embeddings, Xavier for attention, and constants for norms (running statistics are reset) and PReLU. For a network of
    our own the draws are those of its constructor after `torch.manual_seed`; torchvision's constructors draw from other
    distributions, which this function does not know (`KeepInit` keeps them). Any other module with parameters of its
    own is drawn by its method `initialize(generator)` or, without one, by its `reset_parameters()`. Buffers other than
    running statistics stay as they are.

    Args:
        network: any `nn.Module`.
        generator: an int seed, or a CPU generator, which is advanced.
        redraw: called as `redraw(network, generator)` after all this, without gradients: it sets the parameters for
            which there is no such rule (a class token, position embeddings, layer scales), and may change any other.

    Raises:
        TypeError: without `redraw`, a module that this function does not know how to draw (it is named, with the
            remedies).
    """
    require_network(network, "network")
    generator = as_generator(generator)
    unknown = [(name, module) for name, module in network.named_modules() if not init_own_parameters(module, generator)]
    if redraw is not None:
        with seeded_global_rng(draw_seed(generator)):
            redraw(network, generator)
    elif unknown:
        name, module = unknown[0]
        raise TypeError(
            f"cannot re-draw {name or 'the network'} ({type(module).__name__}): it has parameters of its own; give it "
            "a method initialize(generator), or keep what its constructor draws with KeepInit(factory), or pass "
            "redraw=lambda network, generator: ... where that is an option. FixedNetwork(network) and "
            "NetworkBall(network, radius) take any network as it is"
        )
    return network


class KeepInit(Configurable):
    """A factory whose networks keep the weights that it gave them: their authors' initialisation, or pretrained ones.

    Take it wherever a factory is wanted and PyTorch's default distributions are not: `RandomNetworks(KeepInit(vit))`,
    `evaluate(data, test, KeepInit(pretrained))`. The constructor runs with the global random state seeded for a moment,
    so a network is still a function of the seed. Each draw is a new construction.

    Args:
        factory: gives an `nn.Module`; its arguments, if it has any, are those that `KeepInit` is called with.

    Raises:
        TypeError: `factory` is a network, or not callable.
    """

    def __init__(self, factory: Callable[..., nn.Module]) -> None:
        self.factory = require_factory(factory)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(factory)

    def __call__(self, *arguments: Any) -> nn.Module:
        """The factory's network, marked to be left as it is.

        Args:
            arguments: handed on to the factory.
        """
        network = self.factory(*arguments)
        if isinstance(network, nn.Module):
            network.__dict__[_KEEP_INIT] = True
        return network

    def __repr__(self) -> str:
        return f"KeepInit({getattr(self.factory, '__name__', repr(self.factory))})"


_KEEP_INIT = "_distillkit_as_made"


def keeps_init(network: nn.Module) -> bool:
    """Whether `network` came from an `KeepInit` factory, so that its weights are to be left as they are."""
    return bool(network.__dict__.get(_KEEP_INIT, False))


def require_factory(factory: Any, name: str = "factory", wanted: str = "lambda: ConvNet(shape, 10)") -> Any:
    """Return `factory` if it can be called for a network, else raise a TypeError.

    Args:
        factory: what a user gave.
        name: what the argument is called in the message.
        wanted: an example of a right value, for the message.
    """
    if isinstance(factory, nn.Module):
        raise TypeError(
            f"{name} must be a function that makes a network, such as `{wanted}`, but a {type(factory).__name__} "
            "is one; to start from its weights give `KeepInit(lambda: copy.deepcopy(network))`"
        )
    if not callable(factory):
        raise TypeError(
            f"{name} must be a function that makes a network, such as `{wanted}`, got {type(factory).__name__}"
        )
    return factory


def _require_no_arguments(factory: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind()
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        inside = ", ".join(p.name for p in signature.parameters.values() if p.default is p.empty and p.kind < 2)
        raise TypeError(
            f"factory must be callable without arguments, but {name}{signature} needs {inside or 'some'}; wrap it, "
            f"with your values: `lambda: {name if name.isidentifier() else 'factory'}({inside})`"
        ) from error


def build(factory: NetworkFactory, generator: int | torch.Generator, redraw: Redraw | None = None) -> nn.Module:
    """A network whose weights are a function of a seed: call `factory()` and draw its parameters from `generator`.

    The global random state is left as it was.

    Args:
        factory: gives a network of any kind. What its constructor draws is overwritten, unless it is an `KeepInit`.
        generator: an int seed, or a CPU generator, which is advanced.
        redraw: see `initialize`.

    Raises:
        TypeError: the factory is a network itself, wants arguments, or does not return an `nn.Module`; or see
            `initialize`.
    """
    _require_no_arguments(require_factory(factory))
    generator = as_generator(generator)
    with seeded_global_rng(draw_seed(generator.clone_state())):
        network = factory()
    if not isinstance(network, nn.Module):
        raise TypeError(f"factory must return an nn.Module, got {type(network).__name__}")
    if not keeps_init(network):
        return initialize(network, generator, redraw)
    draw_seed(generator)
    return network


def frozen_copy(network: nn.Module) -> nn.Module:
    """A deep copy of a network whose parameters ask for no gradient: gradients in its inputs then cost half as much.

    Args:
        network: any `nn.Module`; it is left as it is.

    Raises:
        TypeError: not an `nn.Module`.
    """
    return copy.deepcopy(require_network(network, "network")).requires_grad_(False)
