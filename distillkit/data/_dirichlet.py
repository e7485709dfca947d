"""The Dirichlet partitioners; public as `distillkit.data.partition`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.data._allocation import Seed, deal, grouped
from distillkit.rng import as_generator


def dirichlet(
    labels: Tensor, clients: int, alpha: float, *, min_size: int = 10, tries: int = 1000, generator: Seed = 0
) -> list[Tensor]:
    """Split each class by shares drawn from Dir(alpha): the field's usual unequal clients, by the rule of NIID-Bench.

    All is redrawn until every client holds `min_size` images.

    The rule of Li et al., "Federated learning on non-IID data silos" (ICDE 2022, NIID-Bench), as the paper states
    it. Its released code also caps the rich clients: that is `dirichlet_capped`.

    Args:
        labels: int [N].
        clients: how many.
        alpha: concentration in [1e-6, 1e6]; smaller is more skewed. At 0.01 most draws leave somebody empty and tens
            to hundreds of redraws are normal.
        min_size: images that every client must hold at least; 0 accepts the first draw, empty clients included.
        tries: draws before giving up.
        generator: seed or generator.

    Raises:
        TypeError, ValueError: a bad argument, fewer than `clients * min_size` images, or no acceptable draw.
    """
    groups = grouped(labels, clients)
    sizes = torch.tensor([len(group) for group in groups])

    def draw(rng: torch.Generator) -> Tensor:
        return _cut(sizes, _log_gamma(alpha, (len(groups), clients), rng).softmax(1)).T

    return _until_fair(draw, groups, labels, clients, alpha, min_size, tries, generator)


def dirichlet_capped(
    labels: Tensor, clients: int, alpha: float, *, min_size: int = 10, tries: int = 1000, generator: Seed = 0
) -> list[Tensor]:
    """`dirichlet` as most released code runs it: who holds N / clients images gets nothing of further classes.

    This is what the released code of NIID-Bench, VHL (Tang et al., ICML 2022) and FedCOG (Ye et al., ICLR 2024) runs.
    Class by class, in increasing order, the shares of full clients are set to zero and the others renormalised, so
    the result depends on the order of the classes and is less skewed than Dir(alpha). VHL asks for
    `min_size` = number of classes, NIID-Bench and FedCOG for 10.

    Args:
        labels, clients, alpha, min_size, tries, generator: see `dirichlet`.

    Raises:
        TypeError, ValueError: as `dirichlet`.
    """
    groups = grouped(labels, clients)
    sizes = torch.tensor([len(group) for group in groups])
    cap = labels.numel() / clients

    def draw(rng: torch.Generator) -> Tensor:
        counts = torch.zeros(clients, len(groups), dtype=torch.long)
        for k, size in enumerate(sizes):
            logits = _log_gamma(alpha, (clients,), rng).masked_fill(counts.sum(1) >= cap, -torch.inf)
            counts[:, k] = _cut(size, logits.softmax(0))
        return counts

    return _until_fair(draw, groups, labels, clients, alpha, min_size, tries, generator)


def dirichlet_prior(labels: Tensor, clients: int, alpha: float, *, generator: Seed = 0) -> list[Tensor]:
    """Give every client as many images as the others, but of classes by a prior of its own, drawn from Dir(alpha).

    Each gets floor(N / clients).

    The partition of "Federated learning with a single shared image" (Soni et al., CVPR 2024 workshops): clients are
    filled one after the other, image by image and without replacement; a class that runs out is taken from the prior,
    which is renormalised. The last clients therefore get what is left and may follow their prior only loosely.
    N mod clients random leftovers of the unfilled classes belong to nobody.

    Args:
        labels: int [N].
        clients: how many.
        alpha: concentration of the priors; smaller is more skewed.
        generator: seed or generator.

    Raises:
        TypeError, ValueError: bad labels, alpha (see `dirichlet`) or generator, or more clients than images.
    """
    groups = grouped(labels, clients)
    rng = as_generator(generator)
    left = torch.tensor([len(group) for group in groups])
    size = int(left.sum()) // clients
    if size == 0:
        raise ValueError(
            f"{clients} clients cannot share {int(left.sum())} images: some would hold none; take fewer clients"
        )
    counts = torch.zeros(clients, len(groups), dtype=torch.long)
    for client in range(clients):
        prior = _log_gamma(alpha, (len(groups),), rng)
        while (need := size - int(counts[client].sum())) > 0:
            shares = prior.masked_fill(left == 0, -torch.inf).softmax(0)
            drawn = torch.multinomial(shares, need, replacement=True, generator=rng)
            taken = torch.bincount(drawn, minlength=len(groups)).minimum(left)
            counts[client] += taken
            left -= taken
    return deal(groups, counts, labels, rng)


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
    """Cut every domain into several clients, each class by shares from Dir(alpha), so that all have enough of each.

    FedLGD's 57 clients of CIFAR-10-C (Huang et al., TMLR 2024): 19 corruptions, three parts each, Dir(2), at least 100
    pictures of each class a client. A class is redrawn until every part has `min_each`; as the classes are drawn apart,
    this is the same as to redraw them all. The authors' script is not released, so that their draw is not known.

    Args:
        labels: class indices int [N].
        domains: int [N], the source of each image.
        parts: clients a domain.
        alpha: concentration; see `dirichlet`.
        min_each: images of each class that every client must hold at least; 0 accepts the first draw.
        tries: draws of one class before giving up.
        generator: seed or generator.

    Returns:
        Clients i, i + D, i + 2 D, ... hold domain i of D, as by `by_domain`.

    Raises:
        TypeError, ValueError: a bad argument; a domain with fewer than `parts * min_each` images of a class; or no
            acceptable draw.
    """
    parts = check.positive_int(parts, "parts")
    groups = grouped(domains, parts, "domains")
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
        hands: list[list[Tensor]] = [[] for _ in range(parts)]
        for k in classes:
            members = group[own[group] == k]
            counts = _enough(len(members), parts, alpha, min_each, tries, rng)
            shuffled = members[torch.randperm(len(members), generator=rng)]
            for hand, piece in zip(hands, shuffled.split(counts)):
                hand.append(piece)
        shares.append([torch.cat(hand).sort().values.to(labels.device) for hand in hands])
    return [own_parts[part] for part in range(parts) for own_parts in shares]


def _enough(total: int, parts: int, alpha: float, min_each: int, tries: int, rng: torch.Generator) -> list[int]:
    """The first drawn cut of `total` images in which every part has `min_each`."""
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
    """Each of `totals` [...] cut at its rounded-down cumulative `shares` [..., clients]; a share of 0 gets nothing."""
    cumulative = shares.cumsum(-1)
    edges = (cumulative / cumulative[..., -1:] * totals[..., None]).long()
    return torch.diff(edges, prepend=torch.zeros_like(edges[..., :1]))


def _log_gamma(alpha: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Logarithms of Gamma(alpha) draws; their softmax is Dir(alpha).

    In logarithms because the draws themselves underflow to 0 at small alpha: Gamma(a) = Gamma(a + 1) U^(1/a).
    """
    alpha = check.real_number(alpha, "alpha", least=1e-6, most=1e6)
    above_one = torch._standard_gamma(torch.full(shape, alpha + 1, dtype=torch.float64), generator=generator)
    uniform = 1 - torch.rand(shape, dtype=torch.float64, generator=generator)
    return above_one.log() + uniform.log() / alpha


def _until_fair(
    draw: Callable[[torch.Generator], Tensor],
    groups: list[Tensor],
    labels: Tensor,
    clients: int,
    alpha: float,
    min_size: int,
    tries: int,
    generator: Seed,
) -> list[Tensor]:
    """Deal by the first drawn table of counts in which every client holds `min_size` images."""
    min_size = check.positive_int(min_size, "min_size", least=0)
    tries = check.positive_int(tries, "tries")
    if clients * min_size > labels.numel():
        raise ValueError(
            f"{labels.numel()} images cannot give {clients} clients at least {min_size} each; lower min_size or clients"
        )
    rng = as_generator(generator)
    best = 0
    for _ in range(tries):
        counts = draw(rng)
        smallest = int(counts.sum(1).min())
        if smallest >= min_size:
            return deal(groups, counts, labels, rng)
        best = max(best, smallest)
    raise ValueError(
        f"none of {tries} draws at alpha={alpha:g} gave all {clients} clients at least {min_size} images (the best "
        f"smallest client held {best}); raise alpha or tries, or lower min_size or clients"
    )
