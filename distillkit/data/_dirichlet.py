"""Dirichlet partitioners, public in `distillkit.data.partition`."""

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
    """Split each class among clients by shares drawn from Dir(alpha), the usual heterogeneous partition.

    The draw is repeated until every client has `min_size` images.

    This is the rule in the paper of Li et al., "Federated learning on non-IID data silos" (ICDE 2022, NIID-Bench). Its
    authors' code also limits the large clients; see `dirichlet_capped`.

    Args:
        labels: int [N].
        clients: number of clients.
        alpha: concentration in [1e-6, 1e6]; smaller is more skewed. At 0.01, most draws leave some client empty, so
            expect tens to hundreds of redraws.
        min_size: smallest number of images per client; 0 accepts the first draw, even with empty clients.
        tries: largest number of draws.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: an invalid argument, fewer than `clients * min_size` images, or no acceptable draw.
    """

    def draw(sizes: Tensor, rng: torch.Generator) -> Tensor:
        return _cut(sizes, _log_gamma(alpha, (len(sizes), clients), rng).softmax(1)).T

    return _draw_allocation(draw, labels, clients, alpha, min_size, tries, generator)


def dirichlet_capped(
    labels: Tensor, clients: int, alpha: float, *, min_size: int = 10, tries: int = 1000, generator: Seed = 0
) -> list[Tensor]:
    """Split as `dirichlet` does, but assign no further classes to a client that has N / clients images.

    The authors' code of NIID-Bench, VHL (Tang et al., ICML 2022) and FedCOG (Ye et al., ICLR 2024) splits in this way.
    Class by class, in increasing order, the shares of full clients are set to zero and the other shares renormalized.
    The result depends on the order of the classes and is less skewed than Dir(alpha). VHL sets `min_size` to the number
    of classes; NIID-Bench and FedCOG use 10.

    Args:
        labels, clients, alpha, min_size, tries, generator: see `dirichlet`.

    Raises:
        TypeError, ValueError: as for `dirichlet`.
    """

    def draw(sizes: Tensor, rng: torch.Generator) -> Tensor:
        counts, cap = torch.zeros(clients, len(sizes), dtype=torch.long), int(sizes.sum()) / clients
        for k, size in enumerate(sizes):
            logits = _log_gamma(alpha, (clients,), rng).masked_fill(counts.sum(1) >= cap, -torch.inf)
            counts[:, k] = _cut(size, logits.softmax(0))
        return counts

    return _draw_allocation(draw, labels, clients, alpha, min_size, tries, generator)


def dirichlet_prior(labels: Tensor, clients: int, alpha: float, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client floor(N / clients) images, sampled by its own class prior, which is drawn from Dir(alpha).

    This is the partition of "Federated learning with a single shared image" (Soni et al., CVPR 2024 workshops). Clients
    are filled one after the other, image by image and without replacement. When a class is exhausted, it is removed
    from the prior, which is renormalized. The last clients therefore get the remaining images and may follow their
    prior only loosely. N mod clients images belong to no client.

    Args:
        labels: int [N].
        clients: number of clients.
        alpha: concentration of the priors; smaller is more skewed.
        generator: seed or random generator.

    Raises:
        TypeError, ValueError: invalid labels, alpha (see `dirichlet`) or generator, or more clients than images.
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
    """Split every domain among several clients, class by class, with shares from Dir(alpha) and a minimum size.

    These are FedLGD's 57 clients of CIFAR-10-C (Huang et al., TMLR 2024): 19 corruptions, three parts each, Dir(2), at
    least 100 pictures of each class per client. Each class is redrawn until every part has `min_each` images. Classes
    are drawn independently, so this is equivalent to redrawing all classes. The authors' script is not released, so
    their draw is unknown.

    Args:
        labels: class indices int [N].
        domains: index of the source of each image, int [N].
        parts: number of clients per domain.
        alpha: concentration; see `dirichlet`.
        min_each: smallest number of images per class and client; 0 accepts the first draw.
        tries: largest number of draws of one class.
        generator: seed or random generator.

    Returns:
        One index tensor per client. With D domains, clients i, i + D, i + 2 D, ... have domain i, as in `by_domain`.

    Raises:
        TypeError, ValueError: an invalid argument; a domain with fewer than `parts * min_each` images of a class; or no
            acceptable draw.
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
    """Draw the sizes of `parts` parts of `total` images. Repeat until each part has at least `min_each` images."""
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
    """Split `totals` [...] at the rounded-down cumulative `shares` [..., clients]. A share of 0 receives no images."""
    cumulative = shares.cumsum(-1)
    edges = (cumulative / cumulative[..., -1:] * totals[..., None]).long()
    return torch.diff(edges, prepend=torch.zeros_like(edges[..., :1]))


def _log_gamma(alpha: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw logarithms of Gamma(alpha); their softmax is Dir(alpha).

    The draws themselves underflow to 0 at small alpha, so the identity Gamma(a) = Gamma(a + 1) U^(1/a) is used.
    """
    alpha = check.real_number(alpha, "alpha", least=1e-6, most=1e6)
    above_one = torch._standard_gamma(torch.full(shape, alpha + 1, dtype=torch.float64), generator=generator)
    uniform = 1 - torch.rand(shape, dtype=torch.float64, generator=generator)
    return above_one.log() + uniform.log() / alpha


def _draw_allocation(
    draw: _Draw, labels: Tensor, clients: int, alpha: float, min_size: int, tries: int, generator: Seed
) -> list[Tensor]:
    """Draw class counts per client until every client has at least `min_size` images, then allocate the images."""
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
