"""Partitioners: who holds which image.

Each is a function of class indices int [N] and a number of clients that returns one sorted index tensor int64 [n_i] a
client, on the labels' device. No image is given twice, and every image is given unless the docstring says which are
left over. A partition is a pure function of its arguments; what cannot be done is refused with a `ValueError` that
says why. Classes are those that occur in `labels`, in increasing order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.data._allocation import Seed, deal, equal, grouped, parts_of, require_enough, share_evenly
from distillkit.data._dirichlet import dirichlet, dirichlet_capped, dirichlet_prior, domains_by_dirichlet
from distillkit.rng import as_generator

__all__ = [
    "by_domain",
    "capped",
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
    """Deal the shuffled images out evenly, whatever their class; sizes differ by at most one.

    Args:
        labels: class indices int [N].
        clients: how many.
        generator: seed or generator.

    Raises:
        TypeError, ValueError: bad labels or generator, or more clients than images.
    """
    everything = torch.cat(grouped(labels, clients))
    if clients > len(everything):
        raise ValueError(
            f"{clients} clients cannot share {len(everything)} images: some would hold none; take fewer clients"
        )
    return deal([everything], equal(len(everything), clients)[:, None], labels, generator)


def classes_per_client(labels: Tensor, clients: int, k: int = 2, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client k classes: class i mod K to client i, and k - 1 random others.

    The owners of a class share it evenly.

    NIID-Bench's quantity-based label skew ("#C = k"), VHL's "2-classes".

    Deviation: with fewer clients than classes the random choice begins with classes that nobody owns yet, so that
    every image is given; the released code fails there.

    Args:
        labels: class indices int [N].
        clients: how many.
        k: how many classes a client has.
        generator: seed or generator.

    Raises:
        TypeError, ValueError: a bad argument; `k` above the number of classes; `clients * k` classes do not cover
            all; a class with fewer images than owners.
    """
    groups = grouped(labels, clients)
    rng = as_generator(generator)
    total = len(groups)
    if check.positive_int(k, "k") > total:
        raise ValueError(f"k must be at most the number of classes, {total}, got {k}")
    if clients * k < total:
        raise ValueError(
            f"{clients} clients with {k} classes each cannot own all {total} classes; take more clients, or a larger k"
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
    return share_evenly(groups, owns, labels, rng)


def class_clusters(labels: Tensor, clients: int, k: int = 2, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client one of the K / k clusters of k contiguous classes; its owners share it evenly.

    Client i has the classes k g, ..., k g + k - 1 with g = i mod (K / k).

    FedCOG's NIID-2 (Ye et al., ICLR 2024): CIFAR-10, 10 clients, k = 2 gives everybody 2 x 2,500 images.

    Deviation: each class is shuffled before it is cut; the released code cuts it in file order, which is not random
    in every dataset.

    Args:
        labels: class indices int [N].
        clients: how many.
        k: how many classes a client has.
        generator: seed or generator.

    Raises:
        TypeError, ValueError: a bad argument; `k` does not divide the number of classes; fewer clients than
            clusters; a class with fewer images than owners.
    """
    groups = grouped(labels, clients)
    total = len(groups)
    if total % check.positive_int(k, "k"):
        raise ValueError(f"k must divide the number of classes, {total}, got {k}")
    if clients < total // k:
        raise ValueError(
            f"{clients} clients cannot own {total // k} clusters of {k} classes, one each; "
            "take more clients, or a larger k"
        )
    cluster = torch.arange(clients) % (total // k)
    owns = cluster[:, None] == torch.arange(total)[None, :] // k
    return share_evenly(groups, owns, labels, generator)


def dominant_class(labels: Tensor, clients: int, share: float = 0.99, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client one class above all: the part `share` of class i mod K goes to client i.

    What is left of a class is dealt evenly to the other clients.

    VHL's "subset" (Tang et al., ICML 2022; "long-tail" in its code): CIFAR-10 with 10 clients gives each 4,950 images
    of its own class and 5 or 6 of each other.

    Deviation: with several clients a class they divide `share` among themselves; in the released code, at 100
    clients, the shares of a class sum to 1.89 and are cut down.

    Args:
        labels: int [N].
        clients: a multiple of the number of classes.
        share: in (0, 1].
        generator: seed or generator.

    Raises:
        TypeError, ValueError: a bad argument, or an owner that would get no image of its class.
    """
    groups = grouped(labels, clients)
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
                f"{int(owner.sum())} owners; take a larger share, or fewer clients"
            )
        counts[owner, k] = equal(dominant, int(owner.sum()))
        if not bool(owner.all()):
            counts[~owner, k] = equal(len(group) - dominant, clients - int(owner.sum())).roll(k)
    return deal(groups, counts, labels, generator)


def by_domain(domains: Tensor, clients: int | None = None, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client the images of one domain, for sets that join several sources (MNIST, SVHN, USPS, ...).

    Args:
        domains: int [N], the source of each image.
        clients: default one a domain, in increasing order; a multiple of the number of domains splits each domain
            evenly at random among clients i, i + D, i + 2 D, ...
        generator: seed or generator.

    Raises:
        TypeError, ValueError: a bad argument, or a domain with fewer images than clients.
    """
    groups = grouped(domains, 1 if clients is None else clients, "domains")
    each, rest = divmod(len(groups) if clients is None else clients, len(groups))
    if rest:
        raise ValueError(f"clients must be a multiple of the number of domains, {len(groups)}, got {clients}")
    for group in groups:
        require_enough(group, each, domains, "domain")
    rng = as_generator(generator)
    shares = []  # of every domain: group by group, because a table [clients, domains] is large for many users
    for group in groups:
        shuffled = group[torch.randperm(len(group), generator=rng)]
        shares.append([part.sort().values for part in shuffled.split(equal(len(group), each).tolist())])
    return [own[turn].to(domains.device) for turn in range(each) for own in shares]


def capped(
    labels: Tensor,
    partition: Sequence[Tensor],
    size: int,
    *,
    keep: Literal["shares", "even"] = "shares",
    generator: Seed = 0,
) -> list[Tensor]:
    """Let every client of a partition keep at most `size` of its images; the others are left over.

    `capped(labels, classes_per_client(labels, 10, 2), 500, keep="even")` is VHL's "2-classes" as its paper has it:
    "each client only has 500 data samples of 2 classes" (Tang et al., ICML 2022, section 5.1), 250 of each as in the
    two shards of McMahan et al. (AISTATS 2017). Its released code has no cap.

    Args:
        labels: int [N].
        partition: one index tensor a client.
        size: the most images that a client keeps; one with no more keeps all.
        keep: "shares" keeps the client's class shares (to within one image a class), "even" as many of each class as of
            the others, as far as it holds them.
        generator: seed or generator; says which images of a class are kept.

    Raises:
        TypeError, ValueError: bad labels, indices outside them, or a bad `size` or `keep`.
    """
    labels = check.class_labels(labels, None, None)
    check.positive_int(size, "size")
    check.one_of(keep, "keep", ("shares", "even"))
    partition = parts_of(partition, len(labels))
    rng, found = as_generator(generator), []
    for held in partition:
        if len(held) > size:
            order = held.cpu()[torch.randperm(len(held), generator=rng)]
            own = labels.cpu()[order]
            counts = own.unique(return_counts=True)[1]
            quota = _largest_remainder(counts, size) if keep == "shares" else _level(counts, size)
            by_class = order[own.argsort(stable=True)].split(counts.tolist())
            kept = torch.cat([mine[: int(q)] for mine, q in zip(by_class, quota)])
            held = kept.sort().values.to(held.device)
        found.append(held)
    return found


def _largest_remainder(counts: Tensor, size: int) -> Tensor:
    """`size` places in proportion to `counts`."""
    exact = counts * size
    places, remainder = exact // counts.sum(), exact % counts.sum()
    places[remainder.argsort(descending=True, stable=True)[: size - int(places.sum())]] += 1
    return places


def _level(counts: Tensor, size: int) -> Tensor:
    """`size` places, the same for all classes but those that have fewer images."""
    places = torch.zeros_like(counts)
    for rank, k in enumerate(counts.argsort(stable=True).tolist()):
        places[k] = min(int(counts[k]), (size - int(places.sum())) // (len(counts) - rank))
    return places


def summary(labels: Tensor, partition: Sequence[Tensor], num_classes: int | None = None) -> Tensor:
    """Who holds how much of what: the images of each class that each client holds, int64 [clients, K].

    Args:
        labels: int [N].
        partition: one index tensor a client.
        num_classes: K. Default: the largest label + 1.

    Raises:
        TypeError, ValueError: bad labels, or a partition without clients.
    """
    labels = check.class_labels(labels, None, num_classes)
    if num_classes is None:
        num_classes = int(labels.max()) + 1 if len(labels) else 1
    partition = parts_of(partition, len(labels))
    return torch.stack([torch.bincount(labels[indices], minlength=num_classes) for indices in partition])
