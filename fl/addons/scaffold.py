"""SCAFFOLD: control variates that cancel the drift of the clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fl.aggregation import AggregatedReplies, Schema
from fl.averaging import AddOn, AveragingServer, FedAvg, Local, Settings, Step
from fl.averaging._composition import require_one_architecture
from fl.message import Entry, Message, Tensors

__all__ = ["SCAFFOLD"]


@dataclass(frozen=True)
class SCAFFOLD(AddOn):
    """SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1 with option II).

    The drift of clients whose data differ is estimated by control variates, and taken out of every gradient.

    Every local gradient becomes g - c_i + c (line 10). After training, c_i <- c_i - c + (x - y_i) / (K eta_l) (line 12)
    and the server moves c by 1/N times the sum of the changes of the clients drawn, N counting all clients (line 17):
    |S|/N of their mean. All variates begin at zero; c_i stays with its client, and moves only if the server has used
    the reply. Buffers and personal parameters have no variate; a parameter that was not trained keeps its own.

    Deviations. K eta_l is `local.effective_lrs`, how far a constant unit gradient goes: the same for plain SGD, and
    right with momentum and a proximal pull, where K eta_l would make the variates too large (6 times at K = 20,
    momentum 0.9).
    Variates that are zero are not sent, so that round 1 sends no more than FedAvg does. The sum of changes is
    unweighted, as in the paper, whose clients weigh the same: give `weights="uniform"` too, for with sample weights
    the corrected steps settle where the unweighted mean gradient is zero. The server's step size eta_g (line 16; 1 in
    the paper's experiments) is `FedAvgM(0.0, lr=eta_g)`.

    Raises:
        ValueError: with Adam on the clients, whose steps are not proportional to gradients, or several architectures.
    """

    key = "Scaffold"
    data_access = "none"
    first_round = 2
    control = Entry[Tensors]("first")
    own = Entry[Tensors]("first")
    drift = Entry[Tensors]("sum")

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse clients whose change of weights is no sum of gradients (option II reads their mean off it)."""
        if settings.optimizer.name == "adam":
            raise ValueError(
                "SCAFFOLD needs optimizer='sgd', got 'adam': its steps do not tell the size of the gradient"
            )
        if settings.optimizer.state == "client":
            raise ValueError(
                "SCAFFOLD needs ClientOptimizer(state='round'), got 'client': old momentum is in the change"
            )
        require_one_architecture(self, settings, "c is all clients' mean")

    def start(self, server: AveragingServer) -> None:
        """The server's variate c begins at zero, as no tensor at all."""
        server.state[self.control] = {}

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Send the server's variate c beside the weights (line 4)."""
        message[self.control] = server.state[self.control]

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """The reply holds a change of c_i for every tensor of the update."""
        schema[self.drift.key] = schema[FedAvg.update.key]

    def before_training(self, local: Local) -> None:
        """Both variates, and the shift c - c_i of every gradient (line 10)."""
        c = local.unprefixed(local.message[self.control])
        own: Tensors = local.memory.get(self.own, {})
        zeros = {n: torch.zeros_like(p) for n, p in local.start.items()}
        scratch = local.scratch(self)
        scratch["c"] = {n: c.get(n, z) for n, z in zeros.items()}
        scratch["own"] = {n: own.get(n, z) for n, z in zeros.items()}
        scratch["shift"] = {n: scratch["c"][n] - scratch["own"][n] for n in zeros}

    def correct_gradient(self, step: Step, grads: Tensors) -> None:
        """Make g the corrected gradient, g - c_i + c (line 10)."""
        for name, shift in step.local.scratch(self)["shift"].items():
            if name in grads:
                grads[name] = grads[name] + shift

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """The new c_i by line 12, option II, into the memory; its change into the reply."""
        c, own = local.scratch(self)["c"], local.scratch(self)["own"]
        drift = {
            n: -c[n] - delta / local.effective_lrs[n] if local.effective_lrs[n] > 0 else torch.zeros_like(delta)
            for n, delta in local.delta.items()
        }
        local.memory[self.own] = {n: own[n] + d for n, d in drift.items()}
        reply[self.drift] = local.prefixed(drift)

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Line 17: c moves by 1/N sum of the changes."""
        c, moved = server.state[self.control], replies[self.drift]
        server.state[self.control] = {n: c.get(n, torch.zeros_like(d)) + d / server.clients for n, d in moved.items()}
