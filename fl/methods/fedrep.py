"""FedRep: all clients share one representation, and each client has its own head."""

from __future__ import annotations

from typing import Any, Literal

from distillkit._utils import check
from fl.averaging import AddOn, FedAvg
from fl.batches import Phase
from fl.networks import Factory

__all__ = ["FedRep"]


class FedRep(FedAvg):
    """FedRep: federated averaging of a representation, with personal heads (Collins et al., ICML 2021, Algorithm 1).

    "Exploiting Shared Representations for Personalized Federated Learning". In each round a client first fits its head
    h_k to its data with the received representation phi fixed. Then the client trains phi with this head fixed, and
    sends the change of phi. Heads never leave their clients. There is no global predictor, so `accuracy` in the history
    is the clients' mean accuracy on their own test data.

    Deviations. The paper denotes the head's update by GRD, which means an optimal solution in the linear analysis and
    epochs of SGD in the experiments; this class trains for epochs. All heads start from the same initial weights. The
    average is uniform, as in Algorithm 1; the authors' code weights clients by samples, as `weights="samples"` does.
    Momentum restarts in each of the two phases. A client that was never drawn is tested with its untrained head.

    Args:
        addons: add-ons, as for `FedAvg`; they see only the shared parameters.
        factory: function of the number of outputs that returns the network.
        head: pattern of the names of the personal parameters.
        head_epochs: tau, the number of passes over the local data for the head; the paper uses 10.
        body_epochs: number of passes over the local data for the representation; the paper uses 1 or 5.
        lr, momentum, batch: options of the clients' training. The defaults are those of the authors' code
            (github.com/lgcollins/FedRep, utils/options.py, lines 15 to 18). With lr None, the optimizer's default in
            `FedAvg` is used. Adam needs momentum 0.
        weights: weighting of the clients in the mean, "uniform" or by "samples".
        options: other options of `FedAvg`, except `personal`, `phases`, `epochs` and `steps`, which FedRep sets.

    Raises:
        ValueError: an option is set by FedRep itself, or is out of range.
    """

    key = "FedAvg"

    def __init__(
        self,
        *addons: AddOn,
        factory: Factory,
        head: str = "classifier.*",
        head_epochs: int = 10,
        body_epochs: int = 1,
        lr: float | None = 0.01,
        momentum: float = 0.5,
        batch: int = 10,
        weights: Literal["samples", "uniform"] = "uniform",
        **options: Any,
    ) -> None:
        for name in {"personal", "phases", "epochs", "steps"} & set(options):
            raise ValueError(
                f"{name} is set by FedRep itself, got {name}={options[name]!r}; use head, head_epochs and body_epochs"
            )
        if not isinstance(head, str) or not head:
            raise TypeError(f"head must be a pattern of parameters' names, as 'classifier.*', got {head!r}")
        phases = (
            Phase(check.positive_int(head_epochs, "head_epochs"), train=head),
            Phase(check.positive_int(body_epochs, "body_epochs"), train=f"!{head}"),
        )
        given = {"lr": lr, "momentum": momentum, "batch": batch, "weights": weights, **options}
        super().__init__(*addons, factory=factory, personal=head, phases=phases, **given)
