"""FedRep: one shared representation, and a head of its own for each client."""

from __future__ import annotations

from typing import Any, Literal

from distillkit import check
from fl.averaging.addon import AddOn
from fl.averaging.fedavg import FedAvg
from fl.batches import Phase
from fl.networks import Factory

__all__ = ["fedrep"]


def fedrep(
    *addons: AddOn,
    network: Factory,
    head: str = "classifier.*",
    head_epochs: int = 10,
    body_epochs: int = 1,
    weights: Literal["samples", "uniform"] = "uniform",
    **options: Any,
) -> FedAvg:
    """Federated averaging of a representation under personal heads (Collins et al., ICML 2021, Algorithm 1).

    "Exploiting Shared Representations for Personalized Federated Learning". In each round a client fits its head h_k to
    its data under the received representation phi, then takes steps on phi under that head, and sends the change of phi
    alone. Heads stay with their clients and never travel; there is no global predictor, so `accuracy` in the history is
    the clients' mean on their own test data.

    Deviations: the paper writes the head's update as GRD (solve to optimality for the linear analysis, epochs of SGD in
    the experiments); here it is epochs. All heads start from the same draw. The average is uniform as in Algorithm 1
    (the released code weighs by samples: `weights="samples"`). The optimiser's momentum starts anew in each of the two
    phases. A client that was never drawn is tested with its untrained head.

    Args:
        *addons: as for `FedAvg`; they see the shared parameters only.
        network: called with the number of outputs, gives the network.
        head: pattern of the personal parameters' names.
        head_epochs: passes over the local data for the head (tau); the paper takes 10.
        body_epochs: passes for the representation; the paper takes 1 or 5.
        weights: "uniform" or "samples".
        **options: as for `FedAvg`, without `personal`, `phases`, `epochs` and `steps`; by default lr 0.01, momentum 0.5
            and batch 10, those of the release (github.com/lgcollins/FedRep, utils/options.py, lines 15 to 18).

    Raises:
        ValueError: an option that FedRep sets itself, or a bad one.
    """
    taken = sorted({"personal", "phases", "epochs", "steps"} & set(options))
    if taken:
        raise ValueError(f"{taken[0]} is set by fedrep itself; use head, head_epochs and body_epochs")
    if not isinstance(head, str) or not head:
        raise TypeError(f"head must be a pattern of parameters' names, as 'classifier.*', got {head!r}")
    phases = (
        Phase(check.positive_int(head_epochs, "head_epochs"), train=head),
        Phase(check.positive_int(body_epochs, "body_epochs"), train=f"!{head}"),
    )
    paper = {"lr": 0.01, "momentum": 0.5, "batch": 10}
    return FedAvg(*addons, network=network, personal=head, phases=phases, weights=weights, **{**paper, **options})
