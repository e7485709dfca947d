"""FedExP: a server step size that grows with the disagreement of the clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distillkit._utils.options import NonNegative
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging import AddOn, AveragingServer, FedAvg, Local, Settings
from fl.averaging._composition import require_one_architecture
from fl.message import Entry, Message, Tensors


def _square(tensors: Iterable[Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in tensors)


@dataclass(frozen=True)
class FedExP(AddOn):
    """FedExP (Jhunjhunwala et al., "Speeding up federated averaging via extrapolation", ICLR 2023, Algorithm 1).

    Let Delta_i be the change of the weights in the training of client i. The server adds the mean of all Delta_i, times
    eta_g, to its weights, with

        eta_g = max(1, sum_i p_i ||Delta_i||^2 / (2 (||mean Delta||^2 + epsilon)))

    where p_i is the weight of client i in the mean (1/M for M clients in the paper). Successive weights oscillate along
    steep directions, so the tested and saved model is the mean of the weights and float buffers after the last two
    rounds. Training continues from the last weights. Each client also sends ||Delta_i||^2, so the server needs only
    sums over clients.

    Deviations. After round 1, the mean would include the untrained initial weights, so the new weights alone are
    tested. The authors' code does the same. In the formula, that code has M epsilon in place of epsilon, and reduces
    epsilon together with the learning rate; this class does neither. Clients test the last weights, which they receive,
    instead of the mean.

    Args:
        epsilon: constant in the denominator, at least 0; larger values are closer to FedAvg. The paper tunes it (10^-3
            on CIFAR, 0.1 on EMNIST).

    Raises:
        ValueError: there are several architectures (only one vector can be extrapolated), or another add-on rescales
            the mean, such as `FedNova`.
    """

    epsilon: NonNegative = 1e-3
    data_access = "none"
    norm = Entry[float]("mean", by=FedAvg.samples)
    before = Entry[Tensors]("first")

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse more than one architecture, because the step size eta_g is computed for a single vector of weights."""
        require_one_architecture(self, settings, "its step size is that of one vector of weights")

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add ||Delta_i||^2, the squared norm of the client's change of the weights, to the schema of the reply."""
        update = schema[FedAvg.update.key]
        schema[self.norm.key] = EntrySpec(1.0, minimum=0.0, maximum=update.max_norm**2, max_ratio=1e4)

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """Send ||Delta_i||^2, the squared norm of the client's change of the weights."""
        reply[self.norm] = _square(update.values())

    def aggregate(self, server: AveragingServer, replies: AggregatedReplies, mean: Tensors) -> Tensors:
        """Return `mean`, the mean change of the clients' weights, times the step size eta_g.

        eta_g is written to the column "extrapolation" of the history.
        """
        size = 2 * (_square(mean.values()) + self.epsilon)
        step = max(1.0, replies[self.norm] / size) if size > 0 else 1.0
        server.notes["extrapolation"] = step
        return {n: step * m for n, m in mean.items()}

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Store `old`, the weights after the previous round, in the server's state.

        `evaluation_model` averages them with the new weights. In round 1, `old` contains the untrained initial weights,
        so nothing is stored.
        """
        if server.round > 1:
            server.state[self.before] = old

    def evaluation_model(self, server: AveragingServer) -> Tensors:
        """Return the mean of the weights after the last two rounds. Integer buffers are those after the last round."""
        last = server.state[FedAvg.model]
        before = server.state.get(self.before, last)
        return {n: torch.lerp(before[n], t, 0.5) if t.is_floating_point() else t for n, t in last.items()}
