"""One number a record and model, higher for "this one was trained on"; what every other attack starts from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit import check

__all__ = ["loss", "margin", "stable_logit"]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Minus the cross-entropy of each record: a model has a smaller loss on what it was trained on.

    The weakest score, and the one to show beside better ones (Yeom et al., "Privacy risk in machine learning", CSF
    2018).

    Args:
        logits: [n, K], of any floating-point type.
        labels: class indices int [n].

    Returns:
        Float64 [n], at most 0.

    Raises:
        TypeError, ValueError: bad logits or labels.
    """
    logits, labels = _checked(logits, labels)
    return -F.cross_entropy(logits, labels, reduction="none")


def stable_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """log(p / (1 - p)) of the true class's probability p: nearly Gaussian over models, so that LiRA may fit Gaussians.

    Carlini et al., "Membership inference attacks from first principles" (S&P 2022), section V.B. Computed as the logit
    of the true class minus the log-sum-exp of the *others*, in float64: through p, all confident records would tie at
    infinity. log p is `-softplus(-score)`.

    Args, returns, raises: as `loss`; any sign. One class alone is refused, as nothing stands against it.
    """
    logits, labels = _checked(logits, labels)
    own, others = _apart(logits, labels)
    return own - others.logsumexp(1)


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of the true class minus the largest other one: the stable logit without its tail.

    Args, returns, raises: as `stable_logit`.
    """
    logits, labels = _checked(logits, labels)
    own, others = _apart(logits, labels)
    return own - others.amax(1)


def _apart(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The logit of the true class [n], and all with that one at minus infinity [n, K]."""
    if logits.shape[1] < 2:
        raise ValueError("logits must have at least 2 columns: with one class there is nothing to compare")
    own = logits.gather(1, labels[:, None]).squeeze(1)
    return own, logits.scatter(1, labels[:, None], -torch.inf)


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = check.rows(logits, "logits").detach().double()
    labels = check.class_labels(labels, len(logits), logits.shape[1])
    return logits, labels.to(logits.device)
