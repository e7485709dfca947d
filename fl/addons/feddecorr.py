"""FedDecorr: a penalty against dimensional collapse of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from distillkit._utils.options import NonNegative
from distillkit.losses import feature_decorrelation
from fl.averaging import AddOn, Step


@dataclass(frozen=True)
class FedDecorr(AddOn):
    """FedDecorr: a penalty against dimensional collapse.

    The penalty keeps the embeddings of clients with few classes from collapsing into few dimensions. It is beta times a
    measure of the correlations between the d dimensions of the embeddings (the input of the last linear layer) in a
    batch. A batch of one image has no correlations, so no penalty is added.

    The paper prints the measure |K|_F^2 / d^2, where K is the correlation matrix [d, d]. The authors' code
    (bytedance/FedDecorr: `FedDecorrLoss` in loss.py) uses another form: 1/N times the mean of the squared off-diagonal
    entries of Z^T Z, where Z [N, d] are the standardized embeddings of a batch of N images. The gradient of this form
    is about N times that of the paper's form. The published betas were tuned with the form in the code, which is
    therefore the default. See `losses.feature_decorrelation` for both forms.

    Paper: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning"
    (ICLR 2023).

    Args:
        beta: weight of the penalty, at least 0; 0 disables the add-on. The paper uses 0.1; the authors' script for
            CIFAR-100 uses 0.05.
        variant: form of the penalty: "released" as in the authors' code, or "paper" as printed, which needs a beta
            about N times larger for the same effect.
    """

    disabled_at_zero = ("beta",)
    beta: NonNegative = 0.1
    variant: Literal["paper", "released"] = "released"

    data_access = "batch"

    def loss(self, step: Step) -> Tensor | None:
        """Return beta times the correlation penalty of the batch's embeddings, or None for a batch of one image."""
        embedding = step.output().embedding
        if len(embedding) < 2:
            return None
        return self.beta * feature_decorrelation(embedding, variant=self.variant)
