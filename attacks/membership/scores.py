"""Membership scores of records from the logits of one model. Attacks with shadow models use them as inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._sanity_checks import check_logits
from distillkit._utils import check


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return minus the cross-entropy of each record, as a membership score: a model fits its training records better.

    This is the simplest and weakest score. Use it as a baseline for better scores (Yeom et al., "Privacy risk in
    machine learning", CSF 2018).

    Args:
        logits: logits of the model for each record, [n, K], of any floating-point type.
        labels: class indices of the records, int [n].

    Returns:
        Scores, float64 [n], at most 0; higher for members.

    Warns:
        UserWarning: the logits are probabilities.

    Raises:
        TypeError, ValueError: the logits or labels are invalid.
    """
    logits, labels = _checked(logits, labels)
    return -F.cross_entropy(logits, labels, reduction="none")


def stable_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(p / (1 - p)) for the predicted probability p of each record's true class.

    Use this score for `lira` and `rmia`. Its distribution over models is nearly Gaussian, as LiRA assumes (Carlini et
    al., "Membership inference attacks from first principles", S&P 2022). It is computed in float64 as the logit of the
    true class minus the log-sum-exp of all *other* logits. If it were computed from p, it would be infinite for all
    records with p rounded to 1. You get log p back by `-softplus(-score)`.

    Args:
        logits: logits of the model for each record, [n, K], of any floating-point type, K at least 2.
        labels: class indices int [n].

    Returns:
        Scores, float64 [n]; positive if p is above a half. Higher for members.

    Raises:
        TypeError, ValueError: the logits or labels are invalid, or there is a single class.
    """
    logits, labels = _checked(logits, labels)
    own, others = _split_true_class(logits, labels)
    return own - others.logsumexp(1)


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logit of each record's true class minus the largest other logit, as a membership score.

    The score `stable_logit` uses all other logits instead of the largest one.

    Args:
        logits: logits of the model for each record, [n, K], of any floating-point type, K at least 2.
        labels: class indices int [n].

    Returns:
        Scores, float64 [n]; positive if the record is classified correctly. Higher for members.

    Raises:
        TypeError, ValueError: the logits or labels are invalid, or there is a single class.
    """
    logits, labels = _checked(logits, labels)
    own, others = _split_true_class(logits, labels)
    return own - others.amax(1)


def _split_true_class(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Split logits [n, K] into those of the true classes and those of the other classes."""
    if logits.shape[1] < 2:
        raise ValueError(
            f"logits must have at least 2 columns, got {list(logits.shape)}: a single class allows no comparison"
        )
    own = logits.gather(1, labels[:, None]).squeeze(1)
    return own, logits.scatter(1, labels[:, None], -torch.inf)


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = check.matrix(logits, "logits").detach().double()
    check_logits(logits, "the network of `logits`", refuse=False)
    labels = check.class_labels(labels, len(logits), logits.shape[1])
    return logits, labels.to(logits.device)
