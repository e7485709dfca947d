"""One resident template per architecture, copied where a network is needed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from distillkit import check
from distillkit.networks import build
from fl.message import Tensors

__all__ = ["Factory", "Templates", "factories"]

Factory = Callable[[int], nn.Module]

_EXAMPLE = "a factory, as `network=lambda outputs: ConvNet((3, 32, 32), outputs)`"


def factories(network: Factory | Mapping[str, Factory] | None, *, several: bool = True) -> dict[str, Factory]:
    """What a method was given as `network`, as architecture -> factory; one factory alone has the name "".

    Args:
        network: what was given.
        several: whether the method knows several architectures.

    Raises:
        TypeError: none, a network instead of a factory, or a function of other arguments than one.
        ValueError: a mapping without factories.
    """
    if network is None:
        raise TypeError(f"network must be given: {_EXAMPLE} (outputs: the classes, and what add-ons put beside them)")
    if isinstance(network, Mapping) and not several:
        raise TypeError(f"network must be one architecture for this method: {_EXAMPLE}, got a mapping")
    given = network if isinstance(network, Mapping) else {"": network}
    if not given:
        raise ValueError(f"network must hold at least one architecture, name -> {_EXAMPLE}, got none")
    for name, factory in given.items():
        if not isinstance(name, str):
            raise TypeError(f"network must map names of architectures to factories, got the name {name!r}")
        label = f"network[{name!r}]" if name else "network"
        if isinstance(factory, nn.Module):
            raise TypeError(
                f"{label} must be {_EXAMPLE}, got a {type(factory).__name__} that is built already; to start "
                "from its weights give `AsMade(lambda outputs: copy.deepcopy(net))` (`distillkit.networks`)"
            )
        check.callable_with(factory, label, ["outputs"], _EXAMPLE, classes=True)
    return dict(given)


class Templates:
    """Builds each architecture once per number of outputs (under a lock: clients run in threads).

    Args:
        network, several: see `factories`.
    """

    def __init__(self, network: Factory | Mapping[str, Factory] | None, *, several: bool = True) -> None:
        self.factories = factories(network, several=several)
        self._built: dict[tuple[str, int], nn.Module] = {}
        self._lock = threading.Lock()

    def of(self, architecture: str, outputs: int) -> nn.Module:
        """The template: names and shapes are right, its weights mean nothing. Not to be changed."""
        with self._lock:
            if (architecture, outputs) not in self._built:
                self._built[architecture, outputs] = self.draw(architecture, outputs, torch.Generator())
            return self._built[architecture, outputs]

    def draw(self, architecture: str, outputs: int, generator: torch.Generator) -> nn.Module:
        """A new network with weights drawn from `generator`."""
        return build(partial(self.factories[architecture], outputs), generator)

    def at(self, architecture: str, outputs: int, weights: Tensors, device: torch.device) -> nn.Module:
        """A new network with the given weights and buffers."""
        net = copy.deepcopy(self.of(architecture, outputs)).to(device)
        net.load_state_dict(weights)
        return net
