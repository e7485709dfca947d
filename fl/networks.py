"""One resident template per architecture, copied where a network is needed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from distillkit.networks import build
from fl.message import Tensors

__all__ = ["Factory", "Templates"]

Factory = Callable[[int], nn.Module]


class Templates:
    """Builds each architecture once per number of outputs (under a lock: clients run in threads)."""

    def __init__(self, factories: Mapping[str, Factory]) -> None:
        self.factories = dict(factories)
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
