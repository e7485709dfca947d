"""Allocation of images to clients, given the number of images of each class that each client receives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.conversion import as_tensor
from distillkit.rng import as_generator

Seed = int | torch.Generator


def class_groups(labels: Tensor, clients: int, name: str = "labels") -> list[Tensor]:
    """Check `labels` and `clients`, and return the image indices of each class that occurs, as tensors on the CPU."""
    check.default_device()
    clients = check.positive_int(clients, "clients")
    labels = check.class_labels(labels, None, None, name).cpu()
    if not len(labels):
        raise ValueError(f"{name} must not be empty")
    return list(labels.argsort(stable=True).split(labels.unique(return_counts=True)[1].tolist()))


def even_counts(total: int, parts: int) -> Tensor:
    """Split `total` into `parts` integers that differ by at most one."""
    return total // parts + (torch.arange(parts) < total % parts).long()


def allocate_evenly(
    groups: list[Tensor], owns: Tensor, labels: Tensor, generator: Seed, group_name: str = "class"
) -> list[Tensor]:
    """Divide each group of images at random and evenly among the clients that own it.

    Args:
        groups: image indices of each group, such as a class or a domain.
        owns: whether client i owns a part of group k, bool [clients, groups].
        labels: class or domain of each image, for error messages. The result is on the device of this tensor.
        generator: seed or random generator.
        group_name: word for a group in error messages.

    Returns:
        One sorted index tensor per client.

    Raises:
        ValueError: a group has fewer images than owners.
    """
    counts = torch.zeros(owns.shape, dtype=torch.long)
    for k, group in enumerate(groups):
        owners = int(owns[:, k].sum())
        if len(group) < owners:
            raise ValueError(
                f"{group_name} {int(labels[group[0]])} has {len(group)} images for {owners} clients, which need one "
                "each; use fewer clients"
            )
        counts[owns[:, k], k] = even_counts(len(group), owners)
    return allocate(groups, counts, labels, generator)


def allocate(groups: list[Tensor], counts: Tensor, labels: Tensor, generator: Seed) -> list[Tensor]:
    """Assign `counts[i, k]` random images of group k to client i.

    Args:
        groups: image indices of each group, such as a class.
        counts: number of images for each client and group, int [clients, groups].
        labels: class of each image. Only the device of this tensor is used; the result is on this device.
        generator: seed or random generator.

    Returns:
        One sorted index tensor per client.
    """
    rng = as_generator(generator)
    clients: list[list[Tensor]] = [[] for _ in counts]
    for k, group in enumerate(groups):
        shuffled = group[torch.randperm(len(group), generator=rng)]
        edges = counts[:, k].cumsum(0).tolist()
        for client, start, end in zip(clients, [0, *edges], edges):
            client.append(shuffled[start:end])
    return [torch.cat(client).sort().values.to(labels.device) for client in clients]


def as_index_tensors(partition: Sequence[Tensor], total: int) -> list[Tensor]:
    """Check a partition of `total` images, and return one index tensor, int64, per client.

    Args:
        partition: one tensor, array or list of indices per client.
        total: number of images.

    Raises:
        TypeError, ValueError: there are no clients, a value is not an index below `total`, or an index is repeated.
    """
    given = check.sequence(partition, "partition", "index tensors, one per client")
    if not given:
        raise ValueError("partition must have at least one client, got none")
    parts = []
    for number, part in enumerate(given):
        own = as_tensor(part, f"partition[{number}]", lists=True)
        own = own.long() if isinstance(own, Tensor) and own.shape == (0,) else own
        if isinstance(own, Tensor) and own.dtype == torch.bool:
            raise TypeError(
                f"partition[{number}] must hold indices of images, got a mask: use mask.nonzero().flatten()"
            )
        parts.append(check.class_labels(own, None, None, f"partition[{number}]"))
        if len(own := parts[-1]) and int(own.max()) >= total:
            raise ValueError(
                f"partition must hold indices in [0, {total}), got {int(own.min())} to {int(own.max())} for client "
                f"{number}; was it made for another set?"
            )
    assigned = torch.cat([indices.cpu() for indices in parts])
    if repeated := len(assigned) - len(assigned.unique()):
        raise ValueError(f"partition must assign each image at most once, but repeats {repeated} indices")
    return parts
