"""Regularization terms for the training of clients (proximal, decorrelation, prototypes), and clipping of logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.devices import is_accelerator
from distillkit.losses._common import pair_tensors, require_float, row_norms


def proximal(parameters: Iterable[Tensor], reference: Iterable[Tensor], mu: float) -> Tensor:
    """Compute the proximal term of FedProx: mu / 2 times the squared distance from the global model's parameters.

    Args:
        parameters: parameters of the model that is trained, for example `model.parameters()`, without buffers.
        reference: parameters of the global model, as detached tensors of the same shapes.
        mu: weight of the term, at least 0.

    Returns:
        A scalar.

    Raises:
        TypeError: a value is not a floating-point tensor.
        ValueError: there are no parameters, the numbers or shapes of the tensors differ, or `mu` is negative.

    Paper: Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), Eq. 2. The code of "Federated
    Learning with a Single Shared Image" instead squares the sum of the differences.
    """
    mu = check.real_number(mu, "mu", least=0)
    pairs = pair_tensors(parameters, reference, ("parameters", "reference"))
    return mu / 2 * torch.stack([(p - r).square().sum() for p, r in pairs]).sum()


def feature_decorrelation(
    embeddings: Tensor, *, variant: Literal["paper", "released"] = "paper", eps: float = 1e-8
) -> Tensor:
    """Compute the term of FedDecorr, which penalizes correlations between embedding dimensions over a batch.

    - "paper": |K|_F^2 / d^2, where K [d, d] is the correlation matrix of the dimensions. The value is between 1/d, for
      uncorrelated dimensions, and 1.
    - "released": the formula of the authors' code: 1/N times the mean of the squared off-diagonal entries of Z^T Z,
      where Z [N, d] are the embeddings, standardized by the unbiased standard deviation. Its gradient with respect to
      the embeddings is that of "paper" times (N-1)^2 d / (N (d-1)), so it is about N times as large. The published
      weight of 0.1 is meant for this variant at batch size 64.

    Args:
        embeddings: float [N, d].
        variant: one of the variants above.
        eps: constant that is added to the variances. With it, a dimension that is constant over the batch has
            correlation 0 with all others.

    Returns:
        A scalar. For a batch with a single embedding, it is 0 with a zero gradient.

    Raises:
        TypeError, ValueError: `embeddings` is not a float tensor [N, d], or an option is out of range.

    Paper: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning"
    (ICLR 2023), L_FedDecorr. The Frobenius norm is computed from the smaller of the matrices Z^T Z and Z Z^T of the
    standardized embeddings, which have equal norms.
    """
    require_float(embeddings, "embeddings", "N, d")
    check.one_of(variant, "variant", ("paper", "released"))
    eps = check.real_number(eps, "eps", above=0)
    n, d = embeddings.shape
    if n == 1:
        return (embeddings * 0).sum()
    var, mean = torch.var_mean(embeddings, 0, correction=1 if variant == "released" else 0)
    z = (embeddings - mean) / (var + eps).sqrt()
    total = (z @ z.T if n < d else z.T @ z).square().sum()
    if variant == "paper":
        return total / (n * d) ** 2
    diagonal = z.square().sum(0).square().sum()
    return (total - diagonal) / (max(d * (d - 1), 1) * n)


def prototype_distance(
    embeddings: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    present: Tensor | None = None,
    *,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Compute the term of FedProto: the squared L2 distance of each embedding from the global prototype of its class.

    Args:
        embeddings: float [N, d].
        labels: class indices int [N] in [0, K).
        prototypes: global prototypes, float [K, d].
        present: whether the prototype of each class exists, bool [K]. Default: all exist. Samples of classes without a
            prototype are excluded.
        reduction: "mean" or "sum" over the remaining samples.

    Returns:
        A scalar. If no sample has a prototype, it is 0 with a zero gradient.

    Raises:
        TypeError, ValueError: a tensor has a wrong dtype or shape, a label is out of range, or the reduction is
            unknown.

    Paper: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI 2022), L_R.
    Deviations: the paper computes the distance between the class means of the batch and the prototypes. This function
    computes it for each sample, like the authors' code. The authors' code averages the squared differences over the d
    dimensions; here they are summed. For the same effect, the weight of the term must therefore be d times as large in
    that code. That code also counts samples without a global prototype as 0 in the mean; here they are excluded.
    """
    require_float(embeddings, "embeddings", "N, d")
    require_float(prototypes, "prototypes", "K, d")
    check.one_of(reduction, "reduction", ("mean", "sum"))
    if prototypes.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"prototypes must have {embeddings.shape[1]} columns as embeddings have, got {prototypes.shape[1]}"
        )
    labels = check.class_labels(labels, len(embeddings), len(prototypes), step=True)
    if present is None:
        present = torch.ones(len(prototypes), dtype=torch.bool, device=prototypes.device)
    elif check.bool_tensor(present, "present", "[K]").shape != prototypes.shape[:1]:
        raise ValueError(f"present must have shape [{len(prototypes)}], got {list(present.shape)}")
    counted = present.index_select(0, labels)
    if not is_accelerator(counted.device):  # where a selection waits for nothing
        embeddings, labels, counted = embeddings[counted], labels[counted], counted[counted]
    differences = torch.where(counted[:, None], embeddings - prototypes.index_select(0, labels), 0)
    total = differences.square().sum(1).sum()
    return total / counted.sum().clamp(min=1) if reduction == "mean" else total


def clip_logit_norm(logits: Tensor, max_norm: float = 2.5, *, continuous: bool = False) -> Tensor:
    """Rescale the logits of each sample to a given norm if they are large. Predicted classes do not change.

    Args:
        logits: float [N, K].
        max_norm: norm s > 0.
        continuous: the rule by which rows are rescaled. True rescales a row whose norm is larger than s to norm s, so
            the result is a continuous function of the logits. False, as in the authors' code, rescales a row whose norm
            is larger than 1/s to norm s. With s = 2.5, rows with norms from 0.4 to 2.5 are thus lengthened, and the
            result has a jump at norm 0.4.

    Returns:
        Logits [N, K]. Gradients also flow through the norm.

    Raises:
        TypeError, ValueError: `logits` is not a float tensor [N, K], or `max_norm` is not positive.

    Source: the authors' code of "Federated Learning with a Single Shared Image" (2024); the paper does not mention it.
    The code applies the rule with s = 2.5 to the logits of clients during training and of the student during
    distillation, but not to the logits that are sent to the server.
    """
    require_float(logits, "logits", "N, K")
    max_norm = check.real_number(max_norm, "max_norm", above=0)
    norms = row_norms(logits).unsqueeze(1)
    long = norms > (max_norm if check.boolean(continuous, "continuous") else 1 / max_norm)
    return torch.where(long, max_norm * logits / torch.where(long, norms, 1), logits)
