"""FedRep: one shared representation, and a head of its own for each client."""

from __future__ import annotations

from typing import Any, Literal

from distillkit._utils import check
from fl.averaging import AddOn, FedAvg
from fl.batches import Phase
from fl.networks import Factory

__all__ = ["FedRep"]


class FedRep(FedAvg):
    """FedRep: federated averaging of a representation under personal heads (Collins et al., ICML 2021, Algorithm 1).

    "Exploiting Shared Representations for Personalized Federated Learning". In each round a client fits its head h_k to
    its data under the received representation phi, then takes steps on phi under that head, and sends the change of
    phi. Heads never leave their clients. There is no global predictor, so `accuracy` in the history is the clients'
    mean accuracy on their own test data.

    Deviations: the paper writes the head's update as GRD (solve to optimality for the linear analysis, epochs of SGD in
    the experiments); here it is epochs. All heads start from the same draw. The average is uniform as in Algorithm 1
    (the released code weighs by samples: `weights="samples"`). Momentum restarts in each of the two phases. A client
    that was never drawn is tested with its untrained head.

    Args:
        addons: as for `FedAvg`; they see the shared parameters only.
        factory: called with the number of outputs, returns the network.
        head: pattern of the personal parameters' names.
        head_epochs: passes over the local data for the head (tau); the paper takes 10.
        body_epochs: passes for the representation; the paper takes 1 or 5.
        lr, momentum, batch: of the clients. The defaults are the release's (github.com/lgcollins/FedRep,
            utils/options.py, lines 15 to 18). lr None is the optimiser's default in `FedAvg`; Adam needs momentum 0.
        weights: a client's weight in the mean, "uniform" or by "samples".
        options: further options of `FedAvg`, except `personal`, `phases`, `epochs` and `steps`, which FedRep sets.

    Raises:
        ValueError: an option that FedRep sets itself, or an option out of range.
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
