"""FedDecorr: embeddings whose dimensions do not collapse into each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from distillkit import check
from distillkit.losses import feature_decorrelation
from fl.addon import AddOn

if TYPE_CHECKING:
    from fl.local import Step

__all__ = ["FedDecorr"]


@dataclass(frozen=True)
class FedDecorr(AddOn):
    """Federated learning against dimensional collapse (Shi et al., ICLR 2023, "Towards Understanding and Mitigating
    Dimensional Collapse in Heterogeneous Federated Learning").

    Adds beta * |K|_F^2 / d^2 to the local objective, K being the correlation matrix [d, d] of the batch's embeddings
    (the input of the last linear layer). A batch of one image has no correlations and no term.

    The released code takes another normalisation, whose gradient is about as many times larger as the batch has
    images, and the published beta belongs to that one: `variant="released"` (see `losses.feature_decorrelation`).
    With beta = 0 it is not installed.

    Args:
        beta: at least 0; the paper takes 0.1.
        variant: "paper" or "released".
    """

    beta: float = 0.1
    variant: Literal["paper", "released"] = "paper"

    reads = "batch"

    def __post_init__(self) -> None:
        check.real_number(self.beta, "beta", least=0.0)
        check.one_of(self.variant, "variant", ("paper", "released"))

    @property
    def off(self) -> bool:
        """No term."""
        return self.beta == 0

    def loss(self, step: Step) -> Tensor | None:
        """beta * L_FedDecorr."""
        embedding = step.out().embedding
        if len(embedding) < 2:
            return None
        return self.beta * feature_decorrelation(embedding, variant=self.variant)
