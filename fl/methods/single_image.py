"""Federated learning with a single shared image, as its paper sets it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from distillkit import check
from distillkit.losses import clip_logit_norm
from fl.addons.shared_image import SharedImage
from fl.averaging.addon import AddOn
from fl.averaging.fedavg import FedAvg
from fl.networks import Factory

__all__ = ["ClippedCrossEntropy", "single_image"]


@dataclass(frozen=True)
class ClippedCrossEntropy:
    """Cross-entropy of logits whose norm is clipped first (`distillkit.losses.clip_logit_norm`)."""

    max_norm: float = 2.5

    def __post_init__(self) -> None:
        check.real_number(self.max_norm, "max_norm", above=0.0)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over images."""
        return F.cross_entropy(clip_logit_norm(logits, self.max_norm), labels)


def single_image(
    image: Tensor,
    *addons: AddOn,
    network: Factory | Mapping[str, Factory],
    shared: Mapping[str, Any] | None = None,
    **options: Any,
) -> FedAvg:
    """Soni, Saeed and Asano, "Federated Learning with a Single Shared Image" (2024), section 4.1.

    `FedAvg(SharedImage(image, **shared), *addons, network=network, ...)` with the paper's clients: Adam at 0.01, 40
    epochs; and from the release batches of 512 and, because of `shared["clip"]`, cross-entropy of clipped logits. The
    paper's FedProx clients have `FedProx(mu)` among the add-ons (the release's term is the square of a sum, with 2.0).
    It draws 8 of 20 clients a round, for 30 rounds.

    Args:
        image: see `SharedImage`.
        addons: further add-ons.
        network: one architecture, or several and `assign`: then the server keeps a copy of each.
        shared: options of `SharedImage`.
        options: of `FedAvg`, instead of the above.
    """
    sharing = SharedImage(image, **check.mapping(shared or {}, "shared"))
    objective = None if sharing.clip is None else ClippedCrossEntropy(sharing.clip)
    paper: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "batch": 512, "objective": objective}
    if options.get("steps") is None and options.get("phases") is None:
        paper["epochs"] = 40
    return FedAvg(sharing, *addons, network=network, **{**paper, **options})
