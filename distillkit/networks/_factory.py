"""Creation of networks by factories, with weights that are drawn from a seed or set by the networks' constructors."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distillkit._utils import check
from distillkit._utils.configurable import Configurable
from distillkit.networks._base import require_network
from distillkit.networks._initialization import Redraw, draw_seed, initialize, seeded_global_rng
from distillkit.rng import as_generator

NetworkFactory = Callable[[], nn.Module]


class KeepInit(Configurable):
    """Factory wrapper that keeps the weights from the networks' constructor, such as pretrained weights.

    This package normally redraws the weights of a new network from PyTorch's default distributions. Wrap the factory to
    prevent this, as in `RandomNetworks(KeepInit(vit))` or `evaluate(data, test, KeepInit(pretrained))`. The constructor
    runs with a seeded global random state, so the network is still a function of the seed.

    Args:
        factory: a function that returns an `nn.Module`. It is called with the arguments with which the `KeepInit`
            object is called.

    Raises:
        TypeError: `factory` is a network, or is not callable.
    """

    def __init__(self, factory: Callable[..., nn.Module]) -> None:
        self.factory = require_factory(factory)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(factory)

    def __call__(self, *arguments: Any) -> nn.Module:
        """Call the factory, and mark the new network, so that this package does not redraw its weights.

        Args:
            arguments: arguments passed to the factory.
        """
        network = self.factory(*arguments)
        if isinstance(network, nn.Module):
            network.__dict__[_KEEP_INIT] = True
        return network

    def __repr__(self) -> str:
        return f"KeepInit({getattr(self.factory, '__name__', repr(self.factory))})"


_KEEP_INIT = "_distillkit_as_made"


def keeps_init(network: nn.Module) -> bool:
    """Return whether `network` came from a `KeepInit` factory, so that its weights must be kept."""
    return bool(network.__dict__.get(_KEEP_INIT, False))


def require_factory(factory: Any, name: str = "factory", wanted: str = "lambda: ConvNet(shape, 10)") -> Any:
    """Check that `factory` is a function that returns a network, and return it.

    Args:
        factory: value to check.
        name: name of the argument in error messages.
        wanted: code of a valid value, as an example in the error message.

    Raises:
        TypeError: `factory` is a network, or is not callable.
    """
    if isinstance(factory, nn.Module):
        raise TypeError(
            f"{name} must be a function that returns a network, such as `{wanted}`, but a {type(factory).__name__} "
            "is a network; to start from its weights pass `KeepInit(lambda: copy.deepcopy(network))`"
        )
    if not callable(factory):
        raise TypeError(
            f"{name} must be a function that returns a network, such as `{wanted}`, got {type(factory).__name__}"
        )
    return factory


def build(factory: NetworkFactory, generator: int | torch.Generator, redraw: Redraw | None = None) -> nn.Module:
    """Create a network with `factory()`, and draw its parameters from `generator`.

    The global random state is unchanged.

    Args:
        factory: a function that returns a network. The constructor's weights are overwritten, unless the factory is a
            `KeepInit`.
        generator: int seed, or a CPU generator, whose state advances.
        redraw: function `redraw(network, generator)` that is called last. It sets parameters for which this package has
            no default distribution, such as a class token.

    Raises:
        TypeError: the factory is a network, requires arguments, or does not return an `nn.Module`; or `redraw` is None
            and the network has parameters without a default distribution.
        ValueError: a parameter of the network is lazy (`nn.LazyLinear`).
    """
    check.callable_with(require_factory(factory), "factory", [], "lambda: ConvNet(shape, 10)", classes=True)
    generator = as_generator(generator)
    with seeded_global_rng(draw_seed(generator.clone_state())):
        network = factory()
    if not isinstance(network, nn.Module):
        raise TypeError(f"factory must return an nn.Module, got {type(network).__name__}")
    check.with_values(network, "factory must return a network")
    if not keeps_init(network):
        return initialize(network, generator, redraw)
    draw_seed(generator)
    return network


def frozen_copy(network: nn.Module) -> nn.Module:
    """Return a deep copy of a network with frozen parameters.

    Frozen parameters halve the cost of computing gradients with respect to the input.

    Args:
        network: any `nn.Module`; it is not changed.

    Raises:
        TypeError: `network` is not an `nn.Module`.
        ValueError: a parameter of the network is lazy (`nn.LazyLinear`).
    """
    return copy.deepcopy(check.with_values(require_network(network))).requires_grad_(False)
