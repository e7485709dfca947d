"""Contrastive losses for embeddings: supervised contrastive (FedLGD, VHL) and model-contrastive (MOON)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils import check
from distillkit._utils.devices import is_accelerator
from distillkit.losses._common import Reduction, reduce, require_float, require_same_shape, unit_rows


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
    """Compute the supervised contrastive loss, which is small if embeddings are similar only within a class.

    Let z_i be the embeddings, scaled to norm 1, and y_i their labels. For an anchor i, let A(i) be all other
    embeddings, and let the positives P(i) be the embeddings in A(i) with the same label. The loss of the anchor is

        loss_i = -1/|P(i)| sum_{p in P(i)} [z_i.z_p / t - log sum_{a in A(i)} exp(z_i.z_a / t)].

    Args:
        embeddings: embeddings, float [N, d]. This function scales them to norm 1.
        labels: class indices int [N].
        other_embeddings: further embeddings from a second source, float [M, d], such as VHL's virtual features or
            FedLGD's global anchors. They are anchors too, as in both papers. Even if they are detached, their loss has
            a gradient with respect to `embeddings`.
        other_labels: class indices of the second source, int [M], with the same meaning as in `labels`, so that
            embeddings of class k from both sources attract each other. For VHL, virtual class k must
            therefore have the label k, although VHL's classifier has separate outputs for the virtual classes.
        temperature: temperature t > 0.
        detach_other: whether to stop gradients to `other_embeddings`, as VHL does. FedLGD's code does not stop them.
        empty: treatment of anchors without positives. "drop" excludes them from the mean. "zero" counts their loss as 0
            in the mean, as in the code of FedLGD and VHL, so the loss becomes smaller if more anchors have no
            positives.
        reduction: "mean" or "sum" over the anchors. FedLGD's paper states the sum, its code uses the mean.

    Returns:
        A scalar. If no anchor has a positive, it is exactly 0 with a zero gradient, never NaN.

    Raises:
        TypeError, ValueError: a tensor has a wrong dtype or shape, only one of `other_embeddings` and `other_labels` is
            given, or an option is out of range.

    Paper: Khosla et al., "Supervised Contrastive Learning" (NeurIPS 2020), Eq. 2 (L_out). Deviations: the authors' code
    multiplies the loss by the ratio of the temperature to a base temperature; this function does not. If an anchor has
    no positives, the authors' code returns NaN; this function uses the option `empty`.
    """
    check.boolean(detach_other, "detach_other")
    require_float(embeddings, "embeddings", "N, d")
    check.class_labels(labels, len(embeddings), None, step=True)
    temperature = check.temperature(temperature)
    check.one_of(empty, "empty", ("drop", "zero"))
    check.one_of(reduction, "reduction", ("mean", "sum"))
    if (other_embeddings is None) != (other_labels is None):
        raise ValueError("other_embeddings and other_labels must be given together, got only one of them")
    if other_embeddings is not None and other_labels is not None:
        require_float(other_embeddings, "other_embeddings", "M, d")
        check.class_labels(other_labels, len(other_embeddings), None, "other_labels", step=True)
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
    rows, anchors = z, positive.any(1)
    if not is_accelerator(z.device):  # where a selection waits for nothing
        rows, positive, itself, anchors = z[anchors], positive[anchors], itself[anchors], anchors[anchors]
    scores = rows @ z.T / temperature
    log_normalizer = scores.masked_fill(itself & anchors[:, None], -torch.inf).logsumexp(1, keepdim=True)
    losses = -((scores - log_normalizer) * positive).sum(1) / positive.sum(1).clamp(min=1)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (len(z) if empty == "zero" else anchors.sum().clamp(min=1))


class SupervisedContrastive(nn.Module):
    """`nn.Module` version of `supervised_contrastive`, with options in the constructor and tensors in the call.

    Args:
        temperature, detach_other, empty, reduction: as in `supervised_contrastive`.
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
        self.temperature = check.temperature(temperature)
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
        """Return the supervised contrastive loss of a batch; see `supervised_contrastive`.

        Args:
            embeddings, other_embeddings: embeddings of the batch, float [N, d], and optionally of other images, such as
                synthetic ones, float [M, d].
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
    """Compute MOON's loss, which is small if embeddings are closer to the global model's than to the previous model's.

        loss = -log[exp(cos(z, z_glob)/t) / (exp(cos(z, z_glob)/t) + exp(cos(z, z_prev)/t))]

    Args:
        embeddings: embeddings z of a batch of images, computed by the model that is trained, float [N, d].
        global_embeddings: embeddings z_glob of the same images, computed by the global model without gradients, float
            [N, d].
        previous_embeddings: embeddings z_prev of the same images, computed by the client's previous local model without
            gradients, float [N, d].
        temperature: temperature t > 0.
        reduction: "mean", "sum" or "none" over the images.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: an argument is not a floating-point tensor, the shapes differ, or an option is out of
            range.

    Paper: Li, He and Song, "Model-Contrastive Federated Learning" (CVPR 2021), Eq. 3. The loss is computed as
    softplus((cos(z, z_prev) - cos(z, z_glob)) / t), which is equal and cannot overflow. The cosine of a zero embedding
    is 0.
    """
    require_same_shape(embeddings, global_embeddings, ("embeddings", "global_embeddings"), "N, d")
    require_same_shape(embeddings, previous_embeddings, ("embeddings", "previous_embeddings"), "N, d")
    temperature = check.temperature(temperature)
    z = unit_rows(embeddings)
    toward = (z * unit_rows(global_embeddings)).sum(1)
    away = (z * unit_rows(previous_embeddings)).sum(1)
    return reduce(F.softplus((away - toward) / temperature), reduction)
