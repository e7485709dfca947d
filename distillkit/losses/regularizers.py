"""Terms added to a client's loss: proximal, decorrelation, prototypes; and the clipping of logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.losses._common import pair_tensors, require_float, row_norms

__all__ = ["clip_logit_norm", "feature_decorrelation", "prototype_distance", "proximal"]


def proximal(parameters: Iterable[Tensor], reference: Iterable[Tensor], mu: float) -> Tensor:
    """FedProx's term, which holds a client near the global model: mu / 2 * the squared distance of their parameters.

    Args:
        parameters: e.g. `model.parameters()`; buffers do not belong here.
        reference: as many tensors of the same shapes, detached (the global model).
        mu: at least 0.

    Returns:
        A scalar.

    Raises:
        TypeError: an entry that is not a floating tensor.
        ValueError: none, different lengths or shapes, mu below 0.

    Paper: Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), Eq. 2. The release of
    "Federated Learning with a Single Shared Image" squares the sum of the differences instead; this is not that.
    """
    mu = check.real_number(mu, "mu", least=0)
    pairs = pair_tensors(parameters, reference, ("parameters", "reference"))
    return mu / 2 * torch.stack([(p - r).square().sum() for p, r in pairs]).sum()


def feature_decorrelation(
    embeddings: Tensor, *, variant: Literal["paper", "released"] = "paper", eps: float = 1e-8
) -> Tensor:
    """FedDecorr's term against collapsed embeddings: how correlated their dimensions are over the batch.

    - "paper": |K|_F^2 / d^2 with K the correlation matrix [d, d]; between 1/d and 1 (its diagonal gives 1/d).
    - "released": the mean square of the off-diagonal entries of Z^T Z, divided by N, with Z standardised by the
      unbiased deviation. Its gradient is (N-1)^2 d / (N (d-1)) times the paper's, so about N times: the published
      weight 0.1 belongs to this one, at batch size 64.

    Args:
        embeddings: float [N, d].
        variant: see above.
        eps: added to the variance; a dimension that is constant over the batch correlates with nothing.

    Returns:
        A scalar. Exactly 0 with a zero gradient for a batch of one, which has no correlations.

    Raises:
        TypeError, ValueError: not such embeddings, options out of range.

    Paper: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning"
    (ICLR 2023), L_FedDecorr. The norm is taken of whichever of Z^T Z and Z Z^T is smaller: they have the same.
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
    """FedProto's term: how far each embedding is from the global prototype of its class, squared L2.

    Args:
        embeddings: float [N, d].
        labels: class indices int [N] in [0, K).
        prototypes: float [K, d].
        present: bool [K], which prototypes exist; default all. Samples of the others are left out of the mean.
        reduction: "mean" or "sum" over the samples that count.

    Returns:
        A scalar; exactly 0 with a zero gradient if no sample's prototype exists.

    Raises:
        TypeError, ValueError: tensors of a wrong kind or shape, labels out of range, an unknown reduction.

    Paper: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI 2022), L_R.
    Deviations: the distance is taken per sample, not between batch class means; the released code does so too, but
    averages over the d dimensions as well (its weight is d times larger than ours for the same effect) and lets
    samples without a global prototype count 0 in the mean.
    """
    require_float(embeddings, "embeddings", "N, d")
    require_float(prototypes, "prototypes", "K, d")
    check.one_of(reduction, "reduction", ("mean", "sum"))
    if prototypes.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"prototypes must have {embeddings.shape[1]} columns as embeddings have, got {prototypes.shape[1]}"
        )
    labels = check.class_labels(labels, len(embeddings), len(prototypes))
    if present is None:
        present = torch.ones(len(prototypes), dtype=torch.bool, device=prototypes.device)
    elif check.bool_tensor(present, "present", "[K]").shape != prototypes.shape[:1]:
        raise ValueError(f"present must have shape [{len(prototypes)}], got {list(present.shape)}")
    counted = present[labels]
    distances = (embeddings[counted] - prototypes[labels[counted]]).square().sum(1)
    return distances.sum() / max(len(distances), 1) if reduction == "mean" else distances.sum()


def clip_logit_norm(logits: Tensor, max_norm: float = 2.5, *, continuous: bool = False) -> Tensor:
    """The single image's rescaling of logits to a norm before its losses; which class is largest never changes.

    Args:
        logits: float [N, K].
        max_norm: s > 0.
        continuous: False, as released: a row longer than 1/s is rescaled to norm s, so with s = 2.5 anything longer
            than 0.4 gets norm 2.5, mostly by stretching, with a jump at 0.4. True: a proper clip, a row longer than s
            is shortened to s.

    Returns:
        Logits [N, K]; gradient flows through the norm too.

    Raises:
        TypeError, ValueError: not such logits, max_norm not above 0.

    Paper: "Federated Learning with a Single Shared Image" (2024) does not mention it; its code applies it with s = 2.5
    to the logits of clients in training and of the student in distillation, not to those sent to the server.
    """
    require_float(logits, "logits", "N, K")
    max_norm = check.real_number(max_norm, "max_norm", above=0)
    norms = row_norms(logits).unsqueeze(1)
    long = norms > (max_norm if check.boolean(continuous, "continuous") else 1 / max_norm)
    return torch.where(long, max_norm * logits / torch.where(long, norms, 1), logits)
