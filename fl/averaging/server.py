"""Server object for the hooks of add-ons, with the method's options and models."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fl.averaging._entries import Entries
from fl.averaging.settings import Settings
from fl.message import Message, Tensors
from fl.method import Predictor
from fl.participants import Server


@dataclass
class AveragingServer(Server):
    """A `Server` that also gives access to the method's options and current models.

    Hooks of add-ons get it as `server`. A new object is made for each call of a hook. Its attributes are the same
    objects as those of the run's server, so changes of `state` and `notes` persist.

    Attributes:
        settings: the method's options and its networks.
    """

    settings: Settings = field(kw_only=True)

    @property
    def rate(self) -> float:
        """The clients' learning rate in this round, lr * lr_decay ** (round - 1)."""
        return self.settings.rate(self.round)

    @property
    def outputs(self) -> int:
        """Number of a network's outputs, including the add-ons' extra outputs."""
        return self.settings.networks.outputs(self.task.num_classes)

    def weights(self, architecture: str, of: Tensors | None = None) -> Tensors:
        """Return the weights of one architecture: parameters and buffers, by their names in the network.

        Args:
            architecture: name of the architecture; "" if there is only one.
            of: weights of all architectures in one dict, from which the weights are selected. Default: the current
                global weights.
        """
        return self.settings.networks.unprefixed(self.state[Entries.model] if of is None else of, architecture)

    def network(self, architecture: str, weights: Tensors | None = None) -> nn.Module:
        """Return a new network on the server's device; the caller may change it.

        Args:
            architecture: name of the architecture; "" if there is only one.
            weights: parameters and buffers, by name. Default: the current global weights.
        """
        weights = self.weights(architecture) if weights is None else weights
        return self.settings.networks.on(self, weights, architecture)

    def trained(self, reply: Message) -> Predictor:
        """Return the model that a client trained, in eval mode.

        The model is rebuilt from the global weights and the client's `reply`. An add-on that calls this function, in
        `AddOn.read_reply`, must also call `fl.require_full_models` in `AddOn.check`.
        """
        networks, state, update = self.settings.networks, self.state[Entries.model], reply[Entries.update]
        trained = {n: state[n] + d for n, d in update.items()}
        for entry in (Entries.buffers, Entries.counters):
            replaced: Tensors = reply.get(entry, {})
            trained |= replaced
        name = next(n for n in networks.names if networks.unprefixed(update, n))
        net = self.network(name, {**networks.unprefixed(state, name), **networks.unprefixed(trained, name)})
        return Predictor(net.eval(), self.settings.tested_outputs(self.task.num_classes))
