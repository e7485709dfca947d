"""Membership scores of records under one model, higher for training members; the input of every other attack."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check

__all__ = ["loss", "margin", "stable_logit"]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return minus the cross-entropy of each record: a model has a smaller loss on its training records.

    This is the simplest and weakest score; use it as a baseline for better scores (Yeom et al., "Privacy risk in
    machine learning", CSF 2018).

    Args:
        logits: logits of the model for each record, [n, K], of any floating-point type.
        labels: class indices int [n].

    Returns:
        Scores, float64 [n], at most 0.

    Raises:
        TypeError, ValueError: the logits or labels are invalid.
    """
    logits, labels = _checked(logits, labels)
    return -F.cross_entropy(logits, labels, reduction="none")


def stable_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the true class's probability p, the score for `lira` and `rmia`.

    The distribution of this score over models is nearly Gaussian, as LiRA assumes (Carlini et al., "Membership
    inference attacks from first principles", S&P 2022). The score is computed in float64 as the logit of the true class
    minus the log-sum-exp of all *other* logits. If it were computed from p, it would be infinite for all confident
    records. log p is `-softplus(-score)`.

    Args:
        logits: logits of the model for each record, [n, K], of any floating-point type, K at least 2.
        labels: class indices int [n].

    Returns:
        Scores, float64 [n], of any sign; above 0 if p is above a half.

    Raises:
        TypeError, ValueError: the logits or labels are invalid, or there is a single class.
    """
    logits, labels = _checked(logits, labels)
    own, others = _split_true_class(logits, labels)
    return own - others.logsumexp(1)


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logit of the true class minus the largest other logit.

    The margin is like the stable logit, but uses only the strongest other class.

    Args:
        logits: logits of the model for each record, [n, K], of any floating-point type, K at least 2.
        labels: class indices int [n].

    Returns:
        Scores, float64 [n]; above 0 if the record is classified correctly.

    Raises:
        TypeError, ValueError: as for `stable_logit`.
    """
    logits, labels = _checked(logits, labels)
    own, others = _split_true_class(logits, labels)
    return own - others.amax(1)


def _split_true_class(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logit of the true class [n], and all logits with the true class set to minus infinity [n, K]."""
    if logits.shape[1] < 2:
        raise ValueError(
            f"logits must have at least 2 columns, got {list(logits.shape)}: a single class allows no comparison"
        )
    own = logits.gather(1, labels[:, None]).squeeze(1)
    return own, logits.scatter(1, labels[:, None], -torch.inf)


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = check.matrix(logits, "logits").detach().double()
    labels = check.class_labels(labels, len(logits), logits.shape[1])
    return logits, labels.to(logits.device)
