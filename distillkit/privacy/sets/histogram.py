"""How many records every class has, released once with noise."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.privacy._clients import ALL_CLIENTS
from distillkit.privacy.events import Event
from distillkit.privacy.ledger import Ledger
from distillkit.privacy.noise import Secret, as_secret

__all__ = ["private_histogram"]


def private_histogram(
    labels: Tensor,
    *,
    num_classes: int,
    sigma: float,
    ledger: Ledger,
    client: int | str = ALL_CLIENTS,
    round: int = 0,
    secret: Secret | int | None = None,
) -> Tensor:
    """How many records each class has, with Gaussian noise, so that it may be published.

    Its sensitivity is 1, because a record adds 1 to one class. Take it once a run and reuse it: weights, denominators
    and dropping small classes are then post-processing.

    Args:
        labels: class indices int [N]; N may be 0.
        num_classes: K, a public number. Classes that nobody holds get noise like all others.
        sigma: noise standard deviation, in records; 0 adds none, which the ledger records as no guarantee.
        ledger: charged before the noise is drawn.
        client, round: whose records these are and when, for the ledger.
        secret: where the noise comes from; see `Secret`.

    Returns:
        The noised counts, float64 [K] on the labels' device, not rounded, possibly negative.

    Raises:
        BudgetExhausted, NotAccountable: see `Ledger.spend`.
        TypeError, ValueError: labels that are no class indices below K, or numbers out of range.
    """
    check.positive_int(num_classes, "num_classes")
    labels = check.class_labels(labels, None, num_classes)
    secret = as_secret(secret)
    ledger.assume("private_histogram")
    ledger.spend(Event("histogram", sigma, client=client, round=round, seeded=secret.seeded))
    counts = torch.bincount(labels, minlength=num_classes).double()
    return counts + secret.normal((num_classes,), sigma).to(counts.device)
