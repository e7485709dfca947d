"""Federated learning with a single shared image, with the settings of Soni, Saeed and Asano (2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check
from distillkit._utils.options import CheckedOptions, Positive
from distillkit.losses import clip_logit_norm
from fl.addons.shared_image import SharedImage
from fl.averaging import AddOn, ClientOptimizer, FedAvg
from fl.averaging.settings import Objective
from fl.networks import Factory


@dataclass(frozen=True)
class ClippedCrossEntropy(CheckedOptions):
    """Cross-entropy of logits whose norm is clipped first (`distillkit.losses.clip_logit_norm`).

    This is the clients' objective in `SingleImage`: `FedAvg(objective=ClippedCrossEntropy())`.

    Args:
        max_norm: largest l2 norm of the logits, above 0; longer logits are rescaled to this norm.
    """

    max_norm: Positive = 2.5

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of clipped logits, averaged over the images.

        Args:
            logits: float [N, K].
            labels: class indices, int64 [N]; or rows of probabilities, float [N, K].

        Raises:
            TypeError, ValueError: logits or labels are not of this form.
        """
        clipped = clip_logit_norm(logits, self.max_norm)
        rows = check.instance(labels, Tensor, "labels", "class indices, int64 [N]").is_floating_point()
        if labels.shape != (logits.shape if rows else logits.shape[:1]) or not (rows or labels.dtype == torch.int64):
            raise ValueError(
                f"labels must be class indices, int64 {list(logits.shape[:1])}, or rows of probabilities, float "
                f"{list(logits.shape)}, got {labels.dtype} {list(labels.shape)}"
            )
        return F.cross_entropy(clipped, labels)


class SingleImage(FedAvg):
    """The method of "Federated Learning with a Single Shared Image" (Soni, Saeed and Asano, 2024, section 4.1).

    The server learns from the clients' predictions on crops of one image, so clients may have different architectures.

    The class is a `FedAvg` with the add-on `SharedImage` and the paper's options for the clients: Adam with learning
    rate 0.01, and 40 epochs. Two defaults are taken from the authors' code: batches of 512 images, and the
    cross-entropy of logits whose norm is clipped first. For the paper's experiments with FedProx, pass the add-on
    `FedProx(mu)`. The paper draws 8 of 20 clients in each of 30 rounds.

    Args:
        image: the shared image, uint8 [C, H, W], or float in [0, 1].
        addons: additional add-ons.
        factory: function that takes the number of outputs and returns a network; or, for several architectures, a
            mapping from the name of each architecture to its function. The server has one model of each architecture.
        shared: options of `SharedImage`, by name.
        optimizer, lr, batch: options of the clients' training. If `lr` is None, the default of `FedAvg` for the
            optimizer is used.
        epochs: number of passes over the local data in a round. Default: 40, unless you pass the option `steps` or
            `phases` of `FedAvg`.
        objective: loss of the clients. Default: `ClippedCrossEntropy(clip)` with the option `clip` of `SharedImage`; if
            `clip` is None, the loss of the task.
        options: other options of `FedAvg`.

    Raises:
        TypeError, ValueError: an option of `FedAvg` or of `SharedImage` is not valid.
    """

    key = "FedAvg"

    def __init__(
        self,
        image: Tensor,
        *addons: AddOn,
        factory: Factory | Mapping[str, Factory],
        shared: Mapping[str, Any] | None = None,
        optimizer: Literal["sgd", "adam"] | ClientOptimizer = "adam",
        lr: float | None = 0.01,
        batch: int = 512,
        epochs: int | None = None,
        objective: Objective | None = None,
        **options: Any,
    ) -> None:
        sharing = SharedImage(image, **check.mapping(shared or {}, "shared"))
        if objective is None and sharing.clip is not None:
            objective = ClippedCrossEntropy(sharing.clip)
        if epochs is None and options.get("steps") is None and options.get("phases") is None:
            epochs = 40
        given = {"optimizer": optimizer, "lr": lr, "batch": batch, "epochs": epochs, "objective": objective, **options}
        super().__init__(sharing, *addons, factory=factory, **given)
