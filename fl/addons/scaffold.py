"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fl.aggregation import AggregatedReplies, Schema
from fl.averaging import AddOn, AveragingServer, FedAvg, Local, Settings, Step
from fl.averaging._composition import require_one_architecture
from fl.message import Entry, Message, Tensors


@dataclass(frozen=True)
class SCAFFOLD(AddOn):
    """SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1 with option II).

    Clients whose data differ drift apart in their local steps. Two control variates, c_i of client i and c of the
    server, estimate this drift. Every local gradient g is corrected to g - c_i + c (line 10). K steps with the learning
    rate eta_l change the received weights x to y_i. Then the client sets c_i <- c_i - c + (x - y_i) / (K eta_l) (line
    12). The server adds to c the sum of the drawn clients' changes of c_i, divided by the number N of all clients (line
    17). All variates start at zero. c_i stays with its client, and changes only if the server has used the client's
    reply. Buffers, and parameters that stay with the clients, have no control variate. The variate of a parameter that
    was not trained does not change.

    Deviations. K eta_l is replaced by `local.effective_lrs`, the distance by which a constant gradient of 1 would move
    a weight. For plain SGD, this is K eta_l. With momentum, K eta_l would make the variates too large (about 6 times
    for K = 20 and momentum 0.9). A variate c that is zero is not sent, so the server sends no more than FedAvg in round
    1. The sum of changes is unweighted, as in the paper. Use SCAFFOLD with `FedAvg(weights="uniform")`. If clients are
    weighted by their number of images instead, the corrected steps still converge to a point at which the unweighted
    mean of the clients' gradients is zero. SCAFFOLD has no option for the server's step size eta_g (line 16; 1 in the
    paper's experiments). To set it, add `FedAvgM(0.0, lr=eta_g)`.

    Raises:
        ValueError: the clients use Adam, whose steps are not proportional to gradients, or there is more than one
            architecture.
    """

    data_access = "none"
    first_round = 2
    control = Entry[Tensors]("first")
    own = Entry[Tensors]("first")
    drift = Entry[Tensors]("sum")

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse Adam, momentum that is kept between rounds, and more than one architecture.

        The control variates are computed from the change of the weights. This change must be a weighted sum of the
        round's gradients. With Adam or with momentum of earlier rounds, it is not.
        """
        if settings.optimizer.name == "adam":
            raise ValueError(
                "SCAFFOLD needs optimizer='sgd', got 'adam': the size of its steps does not follow that of the gradient"
            )
        if settings.optimizer.state == "client":
            raise ValueError(
                "SCAFFOLD needs ClientOptimizer(state='round'), got 'client': momentum of earlier rounds is part of "
                "the change"
            )
        require_one_architecture(self, settings, "c is all clients' mean")

    def start(self, server: AveragingServer) -> None:
        """Set the server's control variate to zero. A control variate of zero is stored as an empty dict."""
        server.state[self.control] = {}

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Send the server's control variate c to the client."""
        message[self.control] = server.state[self.control]

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add the change of the client's control variate to the schema of the reply.

        The change has one tensor for each tensor of the update. The l2 norm of all these tensors together must not
        exceed the largest norm that local training can produce.
        """
        update = schema[FedAvg.update.key]
        control = math.hypot(*(float(torch.linalg.vector_norm(c)) for c in server.state[self.control].values()))
        schema[self.drift.key] = replace(update, max_norm=control + update.max_norm / server.rate)

    def before_training(self, local: Local) -> None:
        """Load the server's control variate c and the client's c_i, and compute c - c_i, which corrects every
        gradient.
        """
        c = local.unprefixed(local.message[self.control])
        own: Tensors = local.memory.get(self.own, {})
        zeros = {n: torch.zeros_like(p) for n, p in local.start.items()}
        scratch = local.scratch(self)
        scratch["c"] = {n: c.get(n, z) for n, z in zeros.items()}
        scratch["own"] = {n: own.get(n, z) for n, z in zeros.items()}
        scratch["shift"] = {n: scratch["c"][n] - scratch["own"][n] for n in zeros}

    def correct_gradient(self, step: Step, grads: Tensors) -> None:
        """Correct the gradients in place: add c - c_i, the server's minus the client's control variate."""
        for name, shift in step.local.scratch(self)["shift"].items():
            if name in grads:
                grads[name] = grads[name] + shift

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """Store the client's new control variate c_i (option II of Algorithm 1) in its memory, and send the change of
        c_i.
        """
        c, own = local.scratch(self)["c"], local.scratch(self)["own"]
        drift = {
            n: -c[n] - delta / local.effective_lrs[n] if local.effective_lrs[n] > 0 else torch.zeros_like(delta)
            for n, delta in local.delta.items()
        }
        local.memory[self.own] = {n: own[n] + d for n, d in drift.items()}
        reply[self.drift] = local.prefixed(drift)

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Update the server's control variate c with the changes of the clients' control variates c_i.

        The sum of the changes, divided by the number of all clients, is added to c.
        """
        c, moved = server.state[self.control], replies[self.drift]
        server.state[self.control] = {n: c.get(n, torch.zeros_like(d)) + d / server.clients for n, d in moved.items()}
