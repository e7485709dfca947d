"""Partitioners: functions that assign images to clients.

Each takes class indices int [N] and a number of clients, and returns one sorted index tensor int64 [n_i] per client, on
the labels' device. No image is assigned twice, and every image is assigned unless the docstring says otherwise. The
result depends on the arguments alone; an impossible request raises a `ValueError` with the reason. Only classes that
occur in `labels` count, in increasing order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.data._allocation import Seed, allocate, allocate_evenly, as_index_tensors, class_groups, even_counts
from distillkit.data._dirichlet import dirichlet, dirichlet_capped, dirichlet_prior, domains_by_dirichlet
from distillkit.rng import as_generator

__all__ = [
    "by_domain",
    "cap_size",
    "class_clusters",
    "classes_per_client",
    "dirichlet",
    "dirichlet_capped",
    "dirichlet_prior",
    "domains_by_dirichlet",
    "dominant_class",
    "iid",
    "summary",
]


def iid(labels: Tensor, clients: int, *, generator: Seed = 0) -> list[Tensor]:
    """Distribute the shuffled images evenly, regardless of class; sizes differ by at most one.

    Args:
        labels: class indices int [N].
        clients: number of clients.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: invalid labels or generator, or more clients than images.
    """
    everything = torch.cat(class_groups(labels, clients))
    if clients > len(everything):
        raise ValueError(
            f"{clients} clients cannot share {len(everything)} images: some would have none; use fewer clients"
        )
    return allocate([everything], even_counts(len(everything), clients)[:, None], labels, generator)


def classes_per_client(labels: Tensor, clients: int, k: int = 2, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client k classes: client i gets class i mod K and k - 1 other classes, chosen at random.

    The owners of a class divide it evenly. This is NIID-Bench's quantity-based label skew ("#C = k"), and VHL's
    "2-classes".

    Deviation: with fewer clients than classes, the random choice prefers classes without an owner, so that every image
    is assigned; the authors' code fails in this case.

    Args:
        labels: class indices int [N].
        clients: number of clients.
        k: number of classes per client.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an invalid argument; `k` above the number of classes; `clients * k` below the number of
            classes; or a class with fewer images than owners.
    """
    groups = class_groups(labels, clients)
    rng = as_generator(generator)
    total = len(groups)
    if check.positive_int(k, "k") > total:
        raise ValueError(f"k must be at most the number of classes, {total}, got {k}")
    if clients * k < total:
        raise ValueError(
            f"{clients} clients with {k} classes each cannot own all {total} classes; use more clients, or a larger k"
        )
    owns = torch.zeros(clients, total, dtype=torch.bool)
    owns[torch.arange(clients), torch.arange(clients) % total] = True
    for client in range(clients):
        others = torch.randperm(total, generator=rng)
        others = others[~owns[client, others]]
        owned_already = owns.any(0)[others].long()
        if clients < total:
            others = others[owned_already.argsort(stable=True)]
        owns[client, others[: k - 1]] = True
    return allocate_evenly(groups, owns, labels, rng)


def class_clusters(labels: Tensor, clients: int, k: int = 2, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client one cluster of k contiguous classes, and divide each cluster evenly among its clients.

    Client i has the classes k g, ..., k g + k - 1 with g = i mod (K / k).

    This is FedCOG's NIID-2 (Ye et al., ICLR 2024): on CIFAR-10, 10 clients and k = 2 give each client 2 x 2,500 images.

    Deviation: each class is shuffled before it is split; the authors' code splits it in file order, which is not random
    in every dataset.

    Args:
        labels: class indices int [N].
        clients: number of clients.
        k: number of classes per client.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an invalid argument; `k` does not divide the number of classes; fewer clients than
            clusters; a class with fewer images than owners.
    """
    groups = class_groups(labels, clients)
    total = len(groups)
    if total % check.positive_int(k, "k"):
        raise ValueError(f"k must divide the number of classes, {total}, got {k}")
    if clients < total // k:
        raise ValueError(
            f"{clients} clients cannot own {total // k} clusters of {k} classes, one each; "
            "use more clients, or a larger k"
        )
    cluster = torch.arange(clients) % (total // k)
    owns = cluster[:, None] == torch.arange(total)[None, :] // k
    return allocate_evenly(groups, owns, labels, generator)


def dominant_class(labels: Tensor, clients: int, share: float = 0.99, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client one dominant class: the fraction `share` of class i mod K goes to client i.

    The rest of a class is distributed evenly among the other clients. This is VHL's "subset" (Tang et al., ICML 2022;
    "long-tail" in its code): CIFAR-10 with 10 clients gives each client 4,950 images of its own class, and 5 or 6 of
    each other class.

    Deviation: several clients of one class divide `share` among themselves; in the authors' code, at 100 clients, the
    shares of a class sum to 1.89 and are truncated.

    Args:
        labels: int [N].
        clients: number of clients, a multiple of the number of classes.
        share: share of a class that goes to its client, in (0, 1].
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an invalid argument, or an owner that would get no image of its class.
    """
    groups = class_groups(labels, clients)
    share = check.real_number(share, "share", above=0.0, most=1.0)
    total = len(groups)
    if clients % total:
        raise ValueError(f"clients must be a multiple of the number of classes, {total}, got {clients}")
    counts = torch.zeros(clients, total, dtype=torch.long)
    for k, group in enumerate(groups):
        owner = torch.arange(clients) % total == k
        dominant = len(group) if bool(owner.all()) else round(share * len(group))
        if dominant < int(owner.sum()):
            raise ValueError(
                f"class {int(labels[group[0]])} has {len(group)} images; {share:g} of them is too few for its "
                f"{int(owner.sum())} owners; use a larger share, or fewer clients"
            )
        counts[owner, k] = even_counts(dominant, int(owner.sum()))
        if not bool(owner.all()):
            counts[~owner, k] = even_counts(len(group) - dominant, clients - int(owner.sum())).roll(k)
    return allocate(groups, counts, labels, generator)


def by_domain(domains: Tensor, clients: int | None = None, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client the images of one domain. Use it for sets that join several sources (MNIST, SVHN, ...).

    Args:
        domains: index of the source of each image, int [N].
        clients: number of clients; default: one per domain, in increasing order of the domains. With a multiple of the
            number of domains D, domain i is divided evenly and at random among clients i, i + D, i + 2 D, ...
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an invalid argument, or a domain with fewer images than clients.
    """
    groups = class_groups(domains, 1 if clients is None else clients, "domains")
    each, rest = divmod(len(groups) if clients is None else clients, len(groups))
    if rest:
        raise ValueError(f"clients must be a multiple of the number of domains, {len(groups)}, got {clients}")
    rng, owners = as_generator(generator), torch.ones(each, 1, dtype=torch.bool)
    # Per domain, because a table [clients, domains] is large for many users.
    shares = [allocate_evenly([group], owners, domains, rng, "domain") for group in groups]
    return [own[turn] for turn in range(each) for own in shares]


def cap_size(
    labels: Tensor,
    partition: Sequence[Tensor],
    size: int,
    *,
    keep: Literal["shares", "even"] = "shares",
    generator: Seed = 0,
) -> list[Tensor]:
    """Limit every client of a partition to `size` images. The removed images then belong to no client.

    `cap_size(labels, classes_per_client(labels, 10, 2), 500, keep="even")` is VHL's "2-classes" as in the paper: "each
    client only has 500 data samples of 2 classes" (Tang et al., ICML 2022, section 5.1), 250 of each as in the two
    shards of McMahan et al. (AISTATS 2017). VHL's code has no such limit.

    Args:
        labels: int [N].
        partition: one index tensor per client.
        size: largest number of images per client. Smaller clients keep all their images.
        keep: "shares" keeps the client's class shares (to within one image per class). "even" keeps the same number of
            images of each class, as far as the client has enough.
        generator: seed or generator that chooses the images of each class.

    Raises:
        TypeError, ValueError: invalid labels, an index outside the labels, or an invalid `size` or `keep`.
    """
    labels = check.class_labels(labels, None, None)
    check.positive_int(size, "size")
    check.one_of(keep, "keep", ("shares", "even"))
    partition = as_index_tensors(partition, len(labels))
    rng, reduced = as_generator(generator), []
    for indices in partition:
        if len(indices) > size:
            order = indices.cpu()[torch.randperm(len(indices), generator=rng)]
            own = labels.cpu()[order]
            counts = own.unique(return_counts=True)[1]
            quota = _largest_remainder(counts, size) if keep == "shares" else _even_quota(counts, size)
            by_class = order[own.argsort(stable=True)].split(counts.tolist())
            kept = torch.cat([mine[: int(q)] for mine, q in zip(by_class, quota)])
            indices = kept.sort().values.to(indices.device)
        reduced.append(indices)
    return reduced


def _largest_remainder(counts: Tensor, size: int) -> Tensor:
    """Distribute `size` images over the classes in proportion to `counts`."""
    exact = counts * size
    quota, remainder = exact // counts.sum(), exact % counts.sum()
    quota[remainder.argsort(descending=True, stable=True)[: size - int(quota.sum())]] += 1
    return quota


def _even_quota(counts: Tensor, size: int) -> Tensor:
    """Distribute `size` images evenly over the classes. Classes with too few images contribute all of them."""
    quota = torch.zeros_like(counts)
    for rank, k in enumerate(counts.argsort(stable=True).tolist()):
        quota[k] = min(int(counts[k]), (size - int(quota.sum())) // (len(counts) - rank))
    return quota


def summary(labels: Tensor, partition: Sequence[Tensor], num_classes: int | None = None) -> Tensor:
    """Count the images of each client and class. Return int64 [clients, K].

    Args:
        labels: int [N].
        partition: one index tensor per client.
        num_classes: K. Default: the largest label + 1.

    Raises:
        TypeError, ValueError: invalid labels, or a partition without clients.
    """
    labels = check.class_labels(labels, None, num_classes)
    if num_classes is None:
        num_classes = int(labels.max()) + 1 if len(labels) else 1
    partition = as_index_tensors(partition, len(labels))
    return torch.stack([torch.bincount(labels[indices], minlength=num_classes) for indices in partition])
