"""FedNova: updates normalized by each client's effective number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging import AddOn, AveragingServer, FedAvg, Local, Settings
from fl.message import Entry, Message, Tensors


@dataclass(frozen=True)
class FedNova(AddOn):
    """FedNova (Wang et al., "Tackling the objective inconsistency problem", NeurIPS 2020, section 4).

    The updates of clients with unequal numbers of steps are normalized before averaging.

    The change of client i's weights is -lr (the learning rate) times a weighted sum of its gradients. The coefficients
    of this sum form the vector a_i with l1 norm |a_i|_1. The client sends d_i, its change divided by |a_i|_1. The
    server adds tau_eff sum_i p_i d_i to the model, with tau_eff = sum_i p_i |a_i|_1, where p_i is the weight of client
    i in the mean of FedAvg; these weights sum to 1. So a client does not gain influence by taking more steps, and
    training converges to a stationary point of the true objective. If |a_i|_1 is the same for all clients, FedNova
    equals FedAvg, up to rounding.

    |a_i|_1 is the distance by which the client's tau steps would move a weight under a constant gradient of 1, divided
    by lr. It is tau for SGD. With momentum rho, it is sum_k (1 - rho^(tau - k)) / (1 - rho); with a proximal term of
    weight mu, it is sum_k (1 - lr mu)^k. Both sums are over k = 0, ..., tau - 1.

    Deviations. If the clients use both momentum and a proximal term, |a_i|_1 is computed exactly for their combination,
    whereas the authors' code mixes the formulas for momentum and for a proximal term. With a proximal term, the
    authors' code also sets tau_eff to the mean number of steps; here, tau_eff is as above. A client sends |a_i|_1 for
    each tensor instead of once per model, because the training phases (option `phases` of `FedAvg`) may train parts of
    the model for different numbers of steps. For Adam, |a_i|_1 is the number of steps.
    """

    data_access = "none"
    tau = Entry[Tensors]("mean", by=FedAvg.samples)

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse momentum that is kept between rounds, because it contains gradients of earlier rounds.

        The effective number of steps (|a_i|_1 in `FedNova`) only counts the gradients of one round.
        """
        if settings.optimizer.state == "client":
            raise ValueError(
                "FedNova needs ClientOptimizer(state='round'), got 'client': momentum of earlier rounds holds earlier "
                "gradients"
            )

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add the client's effective number of steps |a_i|_1 (see `FedNova`) to the schema of the reply.

        The reply contains this number separately for each tensor of the model. It grows with a client's images, of
        which one client may have a thousand times as many as most.
        """
        update = cast(Tensors, schema[FedAvg.update.key].value)
        schema[self.tau.key] = EntrySpec({n: torch.tensor(1.0) for n in update}, minimum=0.0, max_ratio=1e4)

    def scale_update(self, local: Local, update: Tensors) -> Tensors:
        """Return each tensor of the update, divided by the client's effective number of steps |a_i|_1 for this tensor.

        A tensor that was not trained has the update zero.
        """
        return {
            n: u * local.lr / local.effective_lrs[n] if local.effective_lrs[n] > 0 else u for n, u in update.items()
        }

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """Send the client's effective number of steps |a_i|_1 (see `FedNova`), one number per tensor of the model."""
        tau = {n: torch.tensor(path / local.lr) for n, path in local.effective_lrs.items()}
        reply[self.tau] = local.prefixed(tau)

    def aggregate(self, server: AveragingServer, replies: AggregatedReplies, mean: Tensors) -> Tensors:
        """Return the mean of the clients' normalized updates, with each tensor multiplied by the clients' mean
        effective number of steps for this tensor.
        """
        tau = replies[self.tau]
        return {n: m * tau[n] for n, m in mean.items()}
