"""Dirichlet partitioners, which `distillkit.data.partition` exports."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.data._allocation import Seed, allocate, class_groups
from distillkit.rng import as_generator

_Draw = Callable[[Tensor, torch.Generator], Tensor]


def dirichlet(
    labels: Tensor, clients: int, alpha: float, *, min_size: int = 10, tries: int = 1000, generator: Seed = 0
) -> list[Tensor]:
    """Split each class among all clients, in random proportions from a symmetric Dirichlet distribution Dir(alpha).

    This is the usual heterogeneous partition. The proportions of all classes are drawn again until every client has at
    least `min_size` images.

    The rule is described by Li et al., "Federated learning on non-IID data silos" (ICDE 2022, NIID-Bench). The authors'
    code also limits the size of large clients; use `dirichlet_capped` for this variant.

    Args:
        labels: class indices int [N].
        clients: number of clients.
        alpha: concentration, in [1e-6, 1e6]. Smaller values give more skewed partitions. At 0.01, most draws leave some
            client empty, so expect tens to hundreds of draws.
        min_size: smallest number of images per client; 0 accepts the first draw, even with empty clients.
        tries: largest number of draws.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an argument is invalid, there are fewer than `clients * min_size` images, or none of the
            draws gives every client `min_size` images.
    """

    def draw(sizes: Tensor, rng: torch.Generator) -> Tensor:
        return _cut(sizes, _log_gamma(alpha, (len(sizes), clients), rng).softmax(1)).T

    return _draw_allocation(draw, labels, clients, alpha, min_size, tries, generator)


def dirichlet_capped(
    labels: Tensor, clients: int, alpha: float, *, min_size: int = 10, tries: int = 1000, generator: Seed = 0
) -> list[Tensor]:
    """Split like `dirichlet`, but assign no further classes to a client that already has N / clients images.

    The authors' code of NIID-Bench, VHL (Tang et al., ICML 2022) and FedCOG (Ye et al., ICLR 2024) uses this rule. The
    classes are assigned one after the other, in increasing order. Clients that are full get no share of a class, and
    the shares of the other clients are renormalized. The result therefore depends on the order of the classes, and is
    less skewed than that of `dirichlet`. VHL sets `min_size` to the number of classes; NIID-Bench and FedCOG use 10.

    Args:
        labels, clients, alpha, min_size, tries, generator: as in `dirichlet`.

    Raises:
        TypeError, ValueError: for the same reasons as in `dirichlet`.
    """

    def draw(sizes: Tensor, rng: torch.Generator) -> Tensor:
        counts, cap = torch.zeros(clients, len(sizes), dtype=torch.long), int(sizes.sum()) / clients
        for k, size in enumerate(sizes):
            logits = _log_gamma(alpha, (clients,), rng).masked_fill(counts.sum(1) >= cap, -torch.inf)
            counts[:, k] = _cut(size, logits.softmax(0))
        return counts

    return _draw_allocation(draw, labels, clients, alpha, min_size, tries, generator)


def dirichlet_prior(labels: Tensor, clients: int, alpha: float, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client the same number of images, with its own class proportions drawn from Dir(alpha).

    Each client gets floor(N / clients) images. The images that remain, fewer than `clients`, belong to no client. This
    is the partition of "Federated learning with a single shared image" (Soni et al., CVPR 2024 workshops).

    The clients are filled one after the other, without replacement. For each image, a class is drawn from the client's
    proportions. A class that has no images left is removed from the proportions, which are renormalized. The last
    clients therefore get the images that are left, and may deviate from their proportions.

    Args:
        labels: class indices int [N].
        clients: number of clients.
        alpha: concentration of the Dirichlet distribution. Smaller values give more skewed clients.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an argument is invalid, or there are more clients than images.
    """
    groups = class_groups(labels, clients)
    rng = as_generator(generator)
    left = torch.tensor([len(group) for group in groups])
    size = int(left.sum()) // clients
    if size == 0:
        raise ValueError(
            f"{clients} clients cannot share {int(left.sum())} images: some would have none; use fewer clients"
        )
    counts = torch.zeros(clients, len(groups), dtype=torch.long)
    for client in range(clients):
        prior = _log_gamma(alpha, (len(groups),), rng)
        while (need := size - int(counts[client].sum())) > 0:
            shares = prior.masked_fill(left == 0, -torch.inf).softmax(0)
            drawn = torch.multinomial(shares, need, replacement=True, generator=rng)
            assigned = torch.bincount(drawn, minlength=len(groups)).minimum(left)
            counts[client] += assigned
            left -= assigned
    return allocate(groups, counts, labels, rng)


def domains_by_dirichlet(
    labels: Tensor,
    domains: Tensor,
    parts: int = 3,
    alpha: float = 2.0,
    *,
    min_each: int = 100,
    tries: int = 1000,
    generator: Seed = 0,
) -> list[Tensor]:
    """Split each class of every domain among `parts` clients of the domain, in random proportions from Dir(alpha).

    FedLGD (Huang et al., TMLR 2024) forms its 57 clients of CIFAR-10-C in this way: each of 19 corruptions is a domain
    with three clients, the proportions are from Dir(2), and every client has at least 100 pictures of each class. The
    authors' script is not released, so their random draw is unknown.

    The proportions of a class in a domain are drawn again until each client of the domain has at least `min_each`
    images of this class.

    Args:
        labels: class indices int [N].
        domains: index of the domain of each image, int [N].
        parts: number of clients per domain.
        alpha: concentration, as in `dirichlet`.
        min_each: smallest number of images of each class per client; 0 accepts the first draw.
        tries: largest number of draws for one class of a domain.
        generator: seed or random generator.

    Returns:
        One index tensor per client. With D domains, clients i, i + D, i + 2 D, ... have images of domain i, as in
        `by_domain`.

    Raises:
        TypeError, ValueError: an argument is invalid, a domain has fewer than `parts * min_each` images of a class, or
            none of the draws gives every client `min_each` images.
    """
    parts = check.positive_int(parts, "parts")
    groups = class_groups(domains, parts, "domains")
    min_each = check.positive_int(min_each, "min_each", least=0)
    tries = check.positive_int(tries, "tries")
    own = check.class_labels(labels, domains.numel(), None).cpu()
    classes = own.unique().tolist()
    for group in groups:
        for k, count in zip(classes, [int((own[group] == k).sum()) for k in classes]):
            if count < parts * min_each:
                raise ValueError(
                    f"domain {int(domains[group[0]])} has {count} images of class {k}, too few for {parts} clients "
                    f"with at least {min_each} each; lower min_each or parts"
                )
    rng = as_generator(generator)
    shares = []
    for group in groups:
        clients: list[list[Tensor]] = [[] for _ in range(parts)]
        for k in classes:
            members = group[own[group] == k]
            counts = _draw_with_minimum(len(members), parts, alpha, min_each, tries, rng)
            shuffled = members[torch.randperm(len(members), generator=rng)]
            for client, piece in zip(clients, shuffled.split(counts)):
                client.append(piece)
        shares.append([torch.cat(client).sort().values.to(labels.device) for client in clients])
    return [own_parts[part] for part in range(parts) for own_parts in shares]


def _draw_with_minimum(
    total: int, parts: int, alpha: float, min_each: int, tries: int, rng: torch.Generator
) -> list[int]:
    """Divide `total` images into `parts` parts in proportions from Dir(alpha), and return the sizes of the parts.

    The proportions are drawn again, at most `tries` times, until each part has at least `min_each` images.
    """
    best = 0
    for _ in range(tries):
        counts = _cut(torch.tensor(total), _log_gamma(alpha, (parts,), rng).softmax(0))
        if int(counts.min()) >= min_each:
            return counts.tolist()
        best = max(best, int(counts.min()))
    raise ValueError(
        f"none of {tries} draws at alpha={alpha:g} gave all {parts} parts of {total} images of a class {min_each} each "
        f"(the best smallest part had {best}); raise alpha or tries, or lower min_each or parts"
    )


def _cut(totals: Tensor, shares: Tensor) -> Tensor:
    """Divide each number in `totals` [...] into integers in proportion to `shares` [..., clients].

    Each number is multiplied by the cumulative shares, and the products are rounded down. The integers are the
    differences between successive products, so they add up to the number, and a share of 0 gives 0.
    """
    cumulative = shares.cumsum(-1)
    edges = (cumulative / cumulative[..., -1:] * totals[..., None]).long()
    return torch.diff(edges, prepend=torch.zeros_like(edges[..., :1]))


def _log_gamma(alpha: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw logarithms of Gamma(alpha) variables. Their softmax has the distribution Dir(alpha).

    At small alpha, the variables themselves underflow to 0. The logarithms are therefore computed by the identity
    Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha), where U is uniform in (0, 1].
    """
    alpha = check.real_number(alpha, "alpha", least=1e-6, most=1e6)
    above_one = torch._standard_gamma(torch.full(shape, alpha + 1, dtype=torch.float64), generator=generator)
    uniform = 1 - torch.rand(shape, dtype=torch.float64, generator=generator)
    return above_one.log() + uniform.log() / alpha


def _draw_allocation(
    draw: _Draw, labels: Tensor, clients: int, alpha: float, min_size: int, tries: int, generator: Seed
) -> list[Tensor]:
    """Draw how many images of each class every client receives, and allocate random images accordingly."""
    groups = class_groups(labels, clients)
    sizes = torch.tensor([len(group) for group in groups])
    min_size = check.positive_int(min_size, "min_size", least=0)
    tries = check.positive_int(tries, "tries")
    if clients * min_size > labels.numel():
        raise ValueError(
            f"{labels.numel()} images cannot give {clients} clients at least {min_size} each; lower min_size or clients"
        )
    rng = as_generator(generator)
    best = 0
    for _ in range(tries):
        counts = draw(sizes, rng)
        smallest = int(counts.sum(1).min())
        if smallest >= min_size:
            return allocate(groups, counts, labels, rng)
        best = max(best, smallest)
    raise ValueError(
        f"none of {tries} draws at alpha={alpha:g} gave all {clients} clients at least {min_size} images (in the best "
        f"draw, the smallest client got {best}); raise alpha or tries, or lower min_size or clients"
    )
