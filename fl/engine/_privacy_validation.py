"""What a private run writes into its ledger about itself, before its first round."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from distillkit.privacy import Ledger
from distillkit.privacy.validation._arguments import NEW_LEDGER_REMARK
from distillkit.sets import StoredImages
from fl.engine._clients import ClientRegistry
from fl.engine.client_data import ClientData

__all__ = ["EXACT_TESTS", "open_ledger", "remark_on"]

EXACT_TESTS = (
    "accuracies on clients' own test images were asked for (evaluate=): they are exact numbers in the history, which "
    "epsilon does not cover"
)


def open_ledger(clients: ClientRegistry, ledger: Ledger, fresh: bool, panel: str | Sequence[int]) -> None:
    """Note in the ledger what this run's epsilon leaves out, before anything is charged.

    Args:
        clients: who takes part; their sets are compared if they are known anyway.
        ledger: the run's.
        fresh: whether it was made for this run.
        panel: whose own test images are used.

    Warns:
        UserWarning: two clients hold the same images, though the ledger takes their records to be disjoint.
    """
    twins = _twins([_content(held) for held in clients]) if ledger.disjoint and clients.whole else None
    if twins is not None:
        warnings.warn(
            f"clients {twins[0]} and {twins[1]} hold the same images, but the ledger takes clients' records to be "
            "disjoint, so that epsilon is the largest of any client; if a record may lie with several, take "
            "Ledger(disjoint=False), where the events of all clients compose",
            stacklevel=4,
        )
    remark_on(ledger, fresh, panel)


def remark_on(ledger: Ledger, fresh: bool, panel: str | Sequence[int]) -> None:
    """Note in the ledger what this run's epsilon leaves out, wherever its clients are.

    Args:
        ledger, fresh, panel: see `open_ledger`.
    """
    if fresh:
        ledger.add_remark(NEW_LEDGER_REMARK)
    if panel != "none":
        ledger.add_remark(EXACT_TESTS)


def _content(held: ClientData) -> Tensor:
    return held.train.digests if isinstance(held.train, StoredImages) else held.train.images


def _twins(images: Sequence[Tensor]) -> tuple[int, int] | None:
    """The first two tensors that are equal, if any; only those of one shape and sum are compared."""
    alike: dict[tuple[object, float], list[int]] = defaultdict(list)
    for number, one in enumerate(images):
        if not len(one):
            continue
        group = alike[one.shape, float(one.sum(dtype=torch.float64))]
        for other in group:
            if torch.equal(images[other].to(one), one):
                return other, number
        group.append(number)
    return None
