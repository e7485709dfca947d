"""FedRep: all clients share one representation, and each client has its own head."""

from __future__ import annotations

from typing import Any, Literal

from distillkit._utils import check
from fl.averaging import AddOn, FedAvg
from fl.batches import Phase
from fl.networks import Factory


class FedRep(FedAvg):
    """FedRep: federated averaging of a representation, with personal heads (Collins et al., ICML 2021, Algorithm 1).

    The paper is "Exploiting Shared Representations for Personalized Federated Learning". A network consists of a
    representation phi, which all clients share, and a head h_k, which client k never sends. In each round, a client
    first trains its head with the received phi fixed. Then it trains phi with this head fixed, and sends the change of
    phi. There is no global model, so `accuracy` in the history is the clients' mean accuracy on their own test images.

    The head is trained with epochs of SGD, as in the paper's experiments; the paper's analysis of the linear case
    assumes the optimal head. All clients are averaged with equal weights, as in Algorithm 1; the authors' code weights
    clients by samples (`weights="samples"`). All heads start from the same initial weights. Momentum starts at zero in
    the training of the head, and again in that of phi. A client that was never drawn is tested with its untrained head.

    Args:
        addons: additional add-ons, as in `FedAvg`.
        factory: function that takes the number of outputs and returns a network.
        head: pattern of the names of the head's parameters.
        head_epochs: tau, the number of passes over the local data for the head; the paper uses 10.
        body_epochs: number of passes over the local data for the representation; the paper uses 1 or 5.
        lr, momentum, batch: options of the clients' training. The defaults are those of the authors' code
            (github.com/lgcollins/FedRep, utils/options.py, lines 15 to 18). If `lr` is None, the default of `FedAvg`
            for the optimizer is used. Adam requires momentum 0.
        weights: weight of a client in the mean: 1 ("uniform"), or its number of images ("samples").
        options: other options of `FedAvg`, except `personal`, `phases`, `epochs` and `steps`, which FedRep sets.

    Raises:
        ValueError: `options` contains an option that FedRep sets, or an option is out of range.
    """

    key = "FedAvg"  # its entries are those of FedAvg, which columns such as "up.FedAvg.update" name

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
