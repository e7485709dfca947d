"""What all partitioners share: from a table of counts to index tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.conversion import as_tensor
from distillkit.rng import as_generator

Seed = int | torch.Generator


def grouped(labels: Tensor, clients: int, name: str = "labels") -> list[Tensor]:
    """The indices of each class that occurs, on the CPU."""
    clients = check.positive_int(clients, "clients")
    labels = check.class_labels(labels, None, None, name).cpu()
    if not len(labels):
        raise ValueError(f"{name} must not be empty")
    return list(labels.argsort(stable=True).split(labels.unique(return_counts=True)[1].tolist()))


def equal(total: int, parts: int) -> Tensor:
    """`total` cut into `parts` integers that differ by at most one."""
    return total // parts + (torch.arange(parts) < total % parts).long()


def require_enough(group: Tensor, owners: int, labels: Tensor, what: str = "class") -> None:
    """Refuse to share a group among more owners than it has images."""
    if len(group) < owners:
        raise ValueError(
            f"{what} {int(labels[group[0]])} has {len(group)} images for {owners} clients, which want one each; "
            "take fewer clients"
        )


def share_evenly(groups: list[Tensor], owns: Tensor, labels: Tensor, generator: Seed) -> list[Tensor]:
    """Share each group evenly among its owners (bool [clients, groups])."""
    counts = torch.zeros(owns.shape, dtype=torch.long)
    for k, group in enumerate(groups):
        owners = int(owns[:, k].sum())
        require_enough(group, owners, labels)
        counts[owns[:, k], k] = equal(len(group), owners)
    return deal(groups, counts, labels, generator)


def deal(groups: list[Tensor], counts: Tensor, labels: Tensor, generator: Seed) -> list[Tensor]:
    """Give client i `counts[i, k]` random images of group k."""
    rng = as_generator(generator)
    hands: list[list[Tensor]] = [[] for _ in counts]
    for k, group in enumerate(groups):
        shuffled = group[torch.randperm(len(group), generator=rng)]
        edges = counts[:, k].cumsum(0).tolist()
        for hand, start, end in zip(hands, [0, *edges], edges):
            hand.append(shuffled[start:end])
    return [torch.cat(hand).sort().values.to(labels.device) for hand in hands]


def parts_of(partition: Sequence[Tensor], total: int) -> list[Tensor]:
    """The index tensors int64 of a partition of `total` images, one a client; arrays and lists will do.

    Raises:
        TypeError, ValueError: no clients, or what is no index below `total`.
    """
    given = check.sequence(partition, "partition", "index tensors, one a client")
    if not given:
        raise ValueError("partition must have at least one client, got none")
    parts = []
    for number, part in enumerate(given):
        held = as_tensor(part, f"partition[{number}]", lists=True)
        held = held.long() if isinstance(held, Tensor) and held.shape == (0,) else held
        parts.append(check.class_labels(held, None, None, f"partition[{number}]"))
        if len(held) and int(held.max()) >= total:
            raise ValueError(
                f"partition must hold indices in [0, {total}), got {int(held.min())} to {int(held.max())} for client "
                f"{number}; was it made for another set?"
            )
    return parts
