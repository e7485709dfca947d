"""FedDecorr: embeddings whose dimensions do not collapse into each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from distillkit.losses import feature_decorrelation
from fl._options import NonNegative
from fl.averaging import AddOn, Step

__all__ = ["FedDecorr"]


@dataclass(frozen=True)
class FedDecorr(AddOn):
    """Federated learning against dimensional collapse (Shi et al., ICLR 2023, "Towards Understanding and Mitigating
    Dimensional Collapse in Heterogeneous Federated Learning").

    A penalty keeps the embeddings of clients with few classes from collapsing into few dimensions.

    Adds beta times a penalty on the correlations between the d dimensions of the batch's embeddings (the input of the
    last linear layer). A batch of one image has no correlations and no term. With beta = 0 it is not installed.

    The paper prints |K|_F^2 / d^2, K being the correlation matrix [d, d]. Its results are the release's
    (bytedance/FedDecorr: `FedDecorrLoss` in loss.py), which takes the mean square of the off-diagonal entries of
    Z^T Z, divided by the batch's N images: with N = 64 about 64 times stronger at the same beta. The published betas
    belong to that one, so it is the default; see `losses.feature_decorrelation` for both.

    Args:
        beta: weight of the penalty, at least 0; the paper takes 0.1, its release's script for CIFAR-100 0.05.
        variant: "released", or "paper" as printed, which wants a beta about N times larger for the same effect.
    """

    key = "FedDecorr"
    disabled_at_zero = ("beta",)
    beta: NonNegative = 0.1
    variant: Literal["paper", "released"] = "released"

    data_access = "batch"

    def loss(self, step: Step) -> Tensor | None:
        """The term beta * L_FedDecorr of the batch's embeddings; none for a single image."""
        embedding = step.output().embedding
        if len(embedding) < 2:
            return None
        return self.beta * feature_decorrelation(embedding, variant=self.variant)
