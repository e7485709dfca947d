"""Partitioners: functions that assign images to clients.

Each function gets class indices int [N] and a number of clients. It returns one sorted index tensor, int64 [n_i], per
client, on the labels' device. No image is assigned twice. Every image is assigned, unless a docstring states an
exception. The result depends on the arguments alone. Only classes that occur in `labels` are used, in increasing order.
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
    "apply",
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
    """Distribute the shuffled images evenly among the clients, regardless of class. Sizes differ by at most one.

    Args:
        labels: class indices int [N].
        clients: number of clients.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an argument is invalid, or there are more clients than images.
    """
    everything = torch.cat(class_groups(labels, clients))
    if clients > len(everything):
        raise ValueError(
            f"{clients} clients cannot share {len(everything)} images: some would have none; use fewer clients"
        )
    return allocate([everything], even_counts(len(everything), clients)[:, None], labels, generator)


def classes_per_client(labels: Tensor, clients: int, k: int = 2, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client images of k classes.

    If there are K classes, client i gets class i mod K, and k - 1 other classes at random.

    Clients with the same class divide its images evenly. This is the "quantity-based label skew" (#C = k) of
    NIID-Bench, and with k = 2 the "2-classes" partition of VHL.

    Deviation: if there are fewer clients than classes, the random choice prefers classes that no client has yet, so
    that every image is assigned. The code of NIID-Bench fails in this case.

    Args:
        labels: class indices int [N].
        clients: number of clients.
        k: number of classes per client.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an argument is invalid, `k` exceeds the number of classes, `clients * k` is smaller than
            the number of classes, or a class has fewer images than clients that share it.
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
        others = others[owned_already.argsort(stable=True)]
        owns[client, others[: k - 1]] = True
    return allocate_evenly(groups, owns, labels, rng)


def class_clusters(labels: Tensor, clients: int, k: int = 2, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client one cluster of k consecutive classes, and divide each cluster evenly among its clients.

    The K classes form K / k clusters. Client i has cluster g = i mod (K / k), with the classes k g, ..., k g + k - 1.

    This is the partition NIID-2 of FedCOG (Ye et al., ICLR 2024). On CIFAR-10 with 10 clients and k = 2, each client
    gets 2,500 images of each of its two classes.

    Deviation: each class is shuffled before it is divided. The authors' code divides it in file order, which is not
    random in every dataset.

    Args:
        labels: class indices int [N].
        clients: number of clients.
        k: number of classes per client.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an argument is invalid, `k` does not divide the number of classes, there are fewer
            clients than clusters, or a class has fewer images than clients that share it.
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
    """Give every client most images of one class, its dominant class, and few images of the other classes.

    If there are K classes, the dominant class of client i is class i mod K. The fraction `share` of a class goes to the
    clients for which the class is dominant, who divide it evenly. The other images of the class are distributed evenly
    among the other clients.

    This is the partition "subset" of VHL (Tang et al., ICML 2022; "long-tail" in its code). On CIFAR-10 with 10
    clients, each client gets 4,950 images of its dominant class, and 5 or 6 images of each other class.

    Deviation: in the authors' code, the fractions of a class that are meant for the clients may add up to more than 1,
    for example to 1.89 with 100 clients. Their code then cuts off the fractions beyond a sum of 1. Here, the fractions
    always add up to 1.

    Args:
        labels: class indices int [N].
        clients: number of clients, a multiple of the number of classes.
        share: fraction of a class that goes to the clients for which it is dominant, in (0, 1].
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an argument is invalid, or a client would get no image of its dominant class.
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
    """Give every client images of only one domain. Use it for sets that join several sources, such as MNIST and SVHN.

    Args:
        domains: index of the domain (source) of each image, int [N].
        clients: number of clients, a multiple of the number of domains D. Domain i is divided evenly and at random
            among the clients i, i + D, i + 2 D, ... Default: one client per domain, in increasing order of the domains.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an argument is invalid, or a domain has fewer images than clients that share it.
    """
    groups = class_groups(domains, 1 if clients is None else clients, "domains")
    each, rest = divmod(len(groups) if clients is None else clients, len(groups))
    if rest:
        raise ValueError(f"clients must be a multiple of the number of domains, {len(groups)}, got {clients}")
    rng, owners = as_generator(generator), torch.ones(each, 1, dtype=torch.bool)
    # Each domain is allocated separately: a table [clients, domains] would be large for many users.
    shares = [allocate_evenly([group], owners, domains, rng, "domain") for group in groups]
    return [own[turn] for turn in range(each) for own in shares]


def apply(labels: Tensor, partition: Sequence[Tensor], other: Tensor, *, generator: Seed = 0) -> list[Tensor]:
    """Apply a partition to another set, such as the test set, so that every client has the same mix of classes in both.

    Each client gets as many images as the other set allows if the clients of a class share its images in proportion to
    their images in the first set. For example, if a client has a tenth of class 3 and a fifth of class 7, it gets a
    tenth of the other set's class 3 and a fifth of its class 7. If one class is rarer in the other set than in the
    first, the clients with this class get fewer images of their other classes, too. The numbers are rounded up or down
    to integers, and images that would change the mix of a client belong to no client.

    For a partition by domains or users, pass the domains or users of the images instead of their labels.

    Args:
        labels: class indices of the first set, int [N].
        partition: one index tensor per client for the first set, as the functions of this module return.
        other: class indices of the other set, int [M].
        generator: seed or random generator for the random choice of the images.

    Returns:
        One sorted index tensor per client for the other set. Clients without images in the first set get none.

    Raises:
        TypeError, ValueError: an argument is invalid, or the other set has no images of a class that a client has.
    """
    rng = as_generator(generator)
    labels = check.class_labels(labels, None, None).cpu()
    other = check.class_labels(other, None, None, "other")
    parts, device, other = as_index_tensors(partition, len(labels)), other.device, other.cpu()
    owner = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part) for part in parts]))
    classes, of_image = labels[torch.cat(parts).cpu()].unique(return_inverse=True)
    if not len(classes):
        return [torch.zeros(0, dtype=torch.long, device=device) for _ in parts]
    # Pairs of a class and a client, and their numbers of images. A table [clients, classes] is large for many users.
    pairs, counts = torch.stack([of_image, owner], 1).unique(dim=0, return_counts=True)
    k, client = pairs.unbind(1)
    place = torch.searchsorted(classes, other).clamp(max=len(classes) - 1)
    known = (classes[place] == other).nonzero()[:, 0]
    total, left = torch.bincount(of_image), torch.bincount(place[known], minlength=len(classes))
    if not int(left.min()):
        raise ValueError(
            f"other has no image of class {int(classes[left.argmin()])}, so the clients' mixes of classes cannot be "
            "kept; pass a set with all classes of the partition"
        )
    share = (left.double() / total)[k]
    smallest = torch.full((len(parts),), torch.inf, dtype=torch.float64).scatter_reduce_(0, client, share, "amin")
    rarest = torch.zeros(len(parts), dtype=torch.long)
    rarest[client[share == smallest[client]]] = k[share == smallest[client]]
    above, below = left[rarest], total[rarest]
    exact = counts * above[client]
    quota, rest = exact // below[client], exact % below[client] / below[client]
    short = torch.bincount(owner, minlength=len(parts)) * above // below
    short.index_add_(0, client, -quota)
    left.index_add_(0, k, -quota)
    for pair in rest.argsort(descending=True, stable=True).tolist():
        if rest[pair] and short[client[pair]] and left[k[pair]]:
            quota[pair] += 1
            short[client[pair]] -= 1
            left[k[pair]] -= 1
    sizes = [torch.cat([own, spare[None]]) for own, spare in zip(quota.split(torch.bincount(k).tolist()), left)]
    pieces = list[Tensor]()
    for images, own in zip(known[place[known].argsort(stable=True)].split([int(n.sum()) for n in sizes]), sizes):
        pieces += images[torch.randperm(len(images), generator=rng)].split(own.tolist())[:-1]
    assigned: list[list[Tensor]] = [[known[:0]] for _ in parts]
    for to, piece in zip(client.tolist(), pieces):
        assigned[to].append(piece)
    return [torch.cat(own).sort().values.to(device) for own in assigned]


def cap_size(
    labels: Tensor,
    partition: Sequence[Tensor],
    size: int,
    *,
    keep: Literal["shares", "even"] = "shares",
    generator: Seed = 0,
) -> list[Tensor]:
    """Limit every client of a partition to `size` images. The removed images then belong to no client.

    For example, `cap_size(labels, classes_per_client(labels, 10, 2), 500, keep="even")` gives the partition "2-classes"
    of VHL's paper: "each client only has 500 data samples of 2 classes" (Tang et al., ICML 2022, section 5.1). VHL's
    code has no such limit.

    Args:
        labels: class indices int [N].
        partition: one index tensor per client.
        size: largest number of images per client. Smaller clients keep all their images.
        keep: "shares" keeps the client's class proportions; the number of images of each class is rounded. "even" keeps
            the same number of images of each class; a class with too few images keeps all of them.
        generator: seed or generator for the random choice of the images that are kept.

    Raises:
        TypeError, ValueError: an argument is invalid, or an index is outside the labels.
    """
    rng = as_generator(generator)
    labels = check.class_labels(labels, None, None)
    check.positive_int(size, "size")
    check.one_of(keep, "keep", ("shares", "even"))
    partition = as_index_tensors(partition, len(labels))
    reduced = []
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
    """Divide `size` images among the classes in proportion to `counts`, with the largest remainder method."""
    exact = counts * size
    quota, remainder = exact // counts.sum(), exact % counts.sum()
    quota[remainder.argsort(descending=True, stable=True)[: size - int(quota.sum())]] += 1
    return quota


def _even_quota(counts: Tensor, size: int) -> Tensor:
    """Divide `size` images among the classes as evenly as possible, and return the number for each class.

    A class gets at most its number of images in `counts`.
    """
    quota = torch.zeros_like(counts)
    for rank, k in enumerate(counts.argsort(stable=True).tolist()):
        quota[k] = min(int(counts[k]), (size - int(quota.sum())) // (len(counts) - rank))
    return quota


def summary(labels: Tensor, partition: Sequence[Tensor], num_classes: int | None = None) -> Tensor:
    """Count the images of each client and class, and return the table int64 [clients, K].

    Args:
        labels: class indices int [N].
        partition: one index tensor per client.
        num_classes: number of classes K. Default: the largest label + 1.

    Raises:
        TypeError, ValueError: the labels or the partition are invalid.
    """
    labels = check.class_labels(labels, None, num_classes)
    if num_classes is None:
        num_classes = check.classes_of(labels)
    partition = as_index_tensors(partition, len(labels))
    return torch.stack([torch.bincount(labels[indices], minlength=num_classes) for indices in partition])
