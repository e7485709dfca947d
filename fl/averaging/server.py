"""The server's side of weight averaging, as an add-on sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import nn

from fl.averaging.entries import Entries
from fl.averaging.settings import Settings
from fl.message import Message, Tensors
from fl.method import Predictor, Server

__all__ = ["AveragingServer"]


@dataclass
class AveragingServer(Server):
    """A `Server` with what weight averaging adds: the method's settings, and the current models by architecture.

    It is made anew for each call of a hook and shares everything with the server that it was made of, so what is
    written to `state` and `notes` stays.

    Attributes:
        settings: the method's options and its networks.
    """

    settings: Settings = field(kw_only=True)

    @staticmethod
    def of(server: Server, settings: Settings) -> AveragingServer:
        """This server, seen by add-ons of a method with these settings."""
        return AveragingServer(**{f.name: getattr(server, f.name) for f in fields(Server)}, settings=settings)

    @property
    def rate(self) -> float:
        """The clients' learning rate in this round."""
        return self.settings.rate(self.round)

    @property
    def outputs(self) -> int:
        """How many outputs a network has: the classes, and the add-ons' extra ones."""
        return self.settings.networks.outputs(self.task.num_classes)

    def weights(self, architecture: str, of: Tensors | None = None) -> Tensors:
        """The current model of an architecture, or its part of another group of all architectures' weights."""
        return self.settings.networks.part(self.state[Entries.model] if of is None else of, architecture)

    def network(self, architecture: str, weights: Tensors | None = None) -> nn.Module:
        """A new network of an architecture where the server computes, with the current weights or with others."""
        held = self.weights(architecture) if weights is None else weights
        return self.settings.networks.on(self, held, architecture)

    def trained(self, reply: Message) -> Predictor:
        """The model that one client trained, from its reply, in eval mode; for an add-on's `read_reply`.

        An add-on that asks for it calls `fl.averaging.addon.require_replied` in its `check`.
        """
        networks, state, update = self.settings.networks, self.state[Entries.model], reply[Entries.update]
        trained = {n: state[n] + d.to(self.device) for n, d in update.items()}
        for entry in (Entries.buffers, Entries.counters):
            trained |= {n: t.to(self.device) for n, t in reply.get(entry, {}).items()}
        name = next(n for n in networks.names if networks.part(update, n))
        net = self.network(name, {**networks.part(state, name), **networks.part(trained, name)})
        return Predictor(net.eval(), self.settings.tested_outputs(self.task.num_classes))

    def copied(self, net: nn.Module) -> Tensors:
        """A copy of a network's state, to keep in `state`."""
        return {n: t.detach().clone() for n, t in net.state_dict().items()}


@torch.no_grad()
def estimate_statistics(net: nn.Module, images: torch.Tensor) -> None:
    """Re-estimate a network's batch-norm statistics on the given images (cumulative mean over chunks of 64)."""
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    net.train()
    for chunk in images.split(64):
        net(chunk)
