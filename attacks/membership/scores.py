"""One number a record and model, higher for "this one was trained on"; what every other attack starts from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check

__all__ = ["loss", "margin", "stable_logit"]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The plainest score, minus the cross-entropy of each record: a model has a smaller loss on what it was trained on.

    The weakest score, and the one to show beside better ones (Yeom et al., "Privacy risk in machine learning", CSF
    2018).

    Args:
        logits: what the model gives for each record, [n, K], of any floating-point type.
        labels: class indices int [n].

    Returns:
        Float64 [n], at most 0.

    Raises:
        TypeError, ValueError: bad logits or labels.
    """
    logits, labels = _checked(logits, labels)
    return -F.cross_entropy(logits, labels, reduction="none")


def stable_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """The score that `lira` and `rmia` want: log(p / (1 - p)) of the true class's probability p.

    Over models it is nearly Gaussian, so that LiRA may fit Gaussians. Carlini et al., "Membership inference attacks
    from first principles" (S&P 2022). Computed as the logit of the true class minus the log-sum-exp of the
    *others*, in float64: through p, all confident records would tie at infinity. log p is `-softplus(-score)`.

    Args:
        logits: what the model gives for each record, [n, K], of any floating-point type, K at least 2.
        labels: class indices int [n].

    Returns:
        Float64 [n], of any sign; above 0 where p is above a half.

    Raises:
        TypeError, ValueError: bad logits or labels; one class alone, as nothing stands against it.
    """
    logits, labels = _checked(logits, labels)
    own, others = _apart(logits, labels)
    return own - others.logsumexp(1)


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """How clearly the model prefers the true class: its logit minus the largest other one.

    The stable logit without its tail: of the other classes only the strongest counts.

    Args:
        logits: what the model gives for each record, [n, K], of any floating-point type, K at least 2.
        labels: class indices int [n].

    Returns:
        Float64 [n]; above 0 where the record is classified rightly.

    Raises:
        TypeError, ValueError: as `stable_logit`.
    """
    logits, labels = _checked(logits, labels)
    own, others = _apart(logits, labels)
    return own - others.amax(1)


def _apart(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The logit of the true class [n], and all with that one at minus infinity [n, K]."""
    if logits.shape[1] < 2:
        raise ValueError(
            f"logits must have at least 2 columns, got {list(logits.shape)}: with one class there is nothing to compare"
        )
    own = logits.gather(1, labels[:, None]).squeeze(1)
    return own, logits.scatter(1, labels[:, None], -torch.inf)


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = check.matrix(logits, "logits").detach().double()
    labels = check.class_labels(labels, len(logits), logits.shape[1])
    return logits, labels.to(logits.device)
