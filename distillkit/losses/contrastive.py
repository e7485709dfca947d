"""Contrastive losses of embeddings: supervised contrastive (FedLGD, VHL) and model-contrastive (MOON)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils import check
from distillkit.losses._common import Reduction, reduce, require_float, require_same_shape, unit_rows

__all__ = ["SupervisedContrastive", "model_contrastive", "supervised_contrastive"]


def supervised_contrastive(
    embeddings: Tensor,
    labels: Tensor,
    other_embeddings: Tensor | None = None,
    other_labels: Tensor | None = None,
    *,
    temperature: float = 0.07,
    detach_other: bool = True,
    empty: Literal["drop", "zero"] = "drop",
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Compute the supervised contrastive loss, which pulls embeddings of a class together and separates classes.

    With unit vectors z, an anchor i, all other rows A(i) = {j != i} and the positives P(i) = {j != i: y_j = y_i},

        loss_i = -1/|P(i)| sum_{p in P(i)} [z_i.z_p / t - log sum_{a in A(i)} exp(z_i.z_a / t)].

    Args:
        embeddings: embeddings of any scale, float [N, d]; this function L2-normalizes them.
        labels: class indices int [N].
        other_embeddings: embeddings of a second source in the batch, float [M, d] (VHL's virtual features, FedLGD's
            global anchors). They are also anchors, as in both papers: a detached anchor still attracts its positives
            among `embeddings`.
        other_labels: class indices int [M], with the same meaning as in `labels` (for VHL: without the shift of its
            classifier).
        temperature: temperature t > 0.
        detach_other: whether gradients to `other_embeddings` are stopped (VHL). FedLGD's code does not stop them.
        empty: treatment of anchors without positives. "drop" leaves them out of the mean. "zero" counts them as 0 in
            the mean, as in the code of FedLGD and VHL, so the loss shrinks as the share of such anchors grows.
        reduction: "mean" over anchors, or "sum" (the equation in FedLGD's paper; its code uses the mean).

    Returns:
        A scalar. If no anchor has a positive, it is exactly 0 with a zero gradient, never NaN.

    Raises:
        TypeError, ValueError: tensors of a wrong kind or shape, only one of `other_embeddings` and `other_labels`, or
            options out of range.

    Paper: Khosla et al., "Supervised Contrastive Learning" (NeurIPS 2020), Eq. 2 (L_out). Deviations: the ratio of
    temperature to base temperature is 1; "drop" avoids the NaN that the reference code returns for an anchor without
    positives.
    """
    check.boolean(detach_other, "detach_other")
    require_float(embeddings, "embeddings", "N, d")
    check.class_labels(labels, len(embeddings), None)
    temperature = check.real_number(temperature, "temperature", above=0)
    check.one_of(empty, "empty", ("drop", "zero"))
    check.one_of(reduction, "reduction", ("mean", "sum"))
    if (other_embeddings is None) != (other_labels is None):
        raise ValueError("other_embeddings and other_labels must be given together, got only one of them")
    if other_embeddings is not None and other_labels is not None:
        require_float(other_embeddings, "other_embeddings", "M, d")
        check.class_labels(other_labels, len(other_embeddings), None, "other_labels")
        if other_embeddings.shape[1] != embeddings.shape[1]:
            raise ValueError(
                f"other_embeddings must have {embeddings.shape[1]} columns as embeddings have, "
                f"got {other_embeddings.shape[1]}"
            )
        other = other_embeddings.detach() if detach_other else other_embeddings
        embeddings, labels = torch.cat([embeddings, other]), torch.cat([labels, other_labels])

    z = unit_rows(embeddings)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    positive = (labels.unsqueeze(1) == labels.unsqueeze(0)) & ~itself
    anchors = positive.any(1)
    scores = z[anchors] @ z.T / temperature
    log_normalizer = scores.masked_fill(itself[anchors], -torch.inf).logsumexp(1, keepdim=True)
    positive = positive[anchors]
    losses = -((scores - log_normalizer) * positive).sum(1) / positive.sum(1)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (len(z) if empty == "zero" else max(len(losses), 1))


class SupervisedContrastive(nn.Module):
    """`nn.Module` version of `supervised_contrastive`, with options in the constructor and tensors in the call.

    Args:
        temperature, detach_other, empty, reduction: see `supervised_contrastive`.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.07,
        detach_other: bool = True,
        empty: Literal["drop", "zero"] = "drop",
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        self.temperature = check.real_number(temperature, "temperature", above=0)
        self.detach_other = check.boolean(detach_other, "detach_other")
        self.empty: Literal["drop", "zero"] = check.one_of(empty, "empty", ("drop", "zero"))
        self.reduction: Literal["mean", "sum"] = check.one_of(reduction, "reduction", ("mean", "sum"))

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        other_embeddings: Tensor | None = None,
        other_labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of a batch, optionally with a second source; see `supervised_contrastive`.

        Args:
            embeddings, other_embeddings: float [N, d] and [M, d].
            labels, other_labels: class indices int [N] and [M].
        """
        return supervised_contrastive(
            embeddings,
            labels,
            other_embeddings,
            other_labels,
            temperature=self.temperature,
            detach_other=self.detach_other,
            empty=self.empty,
            reduction=self.reduction,
        )


def model_contrastive(
    embeddings: Tensor,
    global_embeddings: Tensor,
    previous_embeddings: Tensor,
    *,
    temperature: float = 0.5,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute MOON's loss, which pulls embeddings to those of the global model and away from the previous model's.

        loss = -log[exp(cos(z, z_glob)/t) / (exp(cos(z, z_glob)/t) + exp(cos(z, z_prev)/t))]

    Args:
        embeddings: embeddings z by the model in training, float [N, d].
        global_embeddings: embeddings z_glob of the same images by the global model, float [N, d], computed without
            gradients.
        previous_embeddings: embeddings z_prev of the same images by the client's previous model, float [N, d], computed
            without gradients.
        temperature: temperature t > 0.
        reduction: "mean", "sum" or "none" over the images.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: tensors of a wrong kind, different shapes, or options out of range.

    Paper: Li, He and Song, "Model-Contrastive Federated Learning" (CVPR 2021), Eq. 3. With one positive and one
    negative the loss is softplus((cos_prev - cos_glob) / t), which cannot overflow. A zero embedding has cosine 0.
    """
    require_same_shape(embeddings, global_embeddings, ("embeddings", "global_embeddings"), "N, d")
    require_same_shape(embeddings, previous_embeddings, ("embeddings", "previous_embeddings"), "N, d")
    temperature = check.real_number(temperature, "temperature", above=0)
    z = unit_rows(embeddings)
    toward = (z * unit_rows(global_embeddings)).sum(1)
    away = (z * unit_rows(previous_embeddings)).sum(1)
    return reduce(F.softplus((away - toward) / temperature), reduction)
