from __future__ import annotations

import re
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distillkit.data import clients as client_sets
from distillkit.data import partition
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.refused import refused


def balanced(classes: int, each: int, seed: int = 0) -> Tensor:
    labels = torch.arange(classes).repeat_interleave(each)
    return labels[torch.randperm(len(labels), generator=derive(seed))]


def uneven(classes: int, least: int, seed: int = 0) -> Tensor:
    """Return shuffled labels with gaps, of which every class has another number of images."""
    labels = 3 * torch.arange(classes).repeat_interleave(least + 7 * torch.arange(classes)) + 2
    return labels[torch.randperm(len(labels), generator=derive(seed))]


def shares(total: int, clients: int) -> list[int]:
    """Divide a number evenly; the first clients get one more."""
    return [len(range(i, total, clients)) for i in range(clients)]


COMPLETE: dict[str, Callable[..., list[Tensor]]] = {
    "iid": partition.iid,
    "dirichlet": lambda y, n, **o: partition.dirichlet(y, n, 0.5, min_size=1, **o),
    "dirichlet_capped": lambda y, n, **o: partition.dirichlet_capped(y, n, 0.5, min_size=1, **o),
    "classes_per_client": lambda y, n, **o: partition.classes_per_client(y, n, 2, **o),
    "class_clusters": lambda y, n, **o: partition.class_clusters(y, n, 2, **o),
    "dominant_class": lambda y, n, **o: partition.dominant_class(y, n, 0.9, **o),
    "by_domain": partition.by_domain,
}
ALL = {**COMPLETE, "dirichlet_prior": lambda y, n, **o: partition.dirichlet_prior(y, n, 0.5, **o)}
RANDOM = {**ALL, "one domain": lambda y, n, **o: partition.domains_by_dirichlet(y, 0 * y, n, min_each=0, **o)}


@pytest.mark.parametrize("name", ALL)
@given(seed=st.integers(0, 10**6), classes=st.sampled_from([2, 4, 6]), times=st.integers(1, 3))
def test_disjoint_sorted_in_range_and_complete(name: str, seed: int, classes: int, times: int) -> None:
    labels = uneven(classes, 20, seed)
    kept = labels.clone()
    parts, again = (ALL[name](labels, classes * times, generator=one) for one in (seed, derive(seed)))
    assert torch.equal(labels, kept)
    assert len(parts) == classes * times
    given_out = torch.cat(parts)
    assert given_out.dtype == torch.int64
    assert len(given_out.unique()) == len(given_out)
    assert all(torch.equal(part, part.sort().values) for part in parts)
    missing = set(range(len(labels))) - set(given_out.tolist())
    assert len(missing) == (len(labels) % (classes * times) if name == "dirichlet_prior" else 0)
    assert name != "dirichlet_prior" or len(set(map(len, parts))) == 1
    dense = ALL[name](labels // 3, classes * times, generator=seed)  # class numbers do not matter, but for their order
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(parts, again, dense, strict=True))


@pytest.mark.parametrize("name", RANDOM)
def test_clients_get_random_images(name: str, global_rng_untouched: None) -> None:
    """An image is given to no client for its place in the set: in the mean over seeds, all places are equal."""
    labels = balanced(2, 30)
    parts = [RANDOM[name](labels, 4, generator=seed) for seed in range(40)]
    assert len({str(one) for one in parts}) > 30
    for k in range(2):
        places = {int(row): i for i, row in enumerate((labels == k).nonzero())}
        for client in range(4):
            mine = [places[row] for one in parts for row in one[client].tolist() if row in places]
            assert len(mine) < 40 or sum(mine) / len(mine) == pytest.approx(14.5, abs=4.5 * 8.66 / len(mine) ** 0.5)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("labels", "clients", "error", "match"),
    [
        (torch.rand(8), 2, TypeError, "integer"),
        (torch.zeros(2, 2, dtype=torch.long), 2, ValueError, "one dimension"),
        (torch.zeros(0, dtype=torch.long), 2, ValueError, "must not be empty"),
        (torch.tensor([0, -1]), 1, ValueError, "at least 0"),
        (torch.arange(2), 0, ValueError, "clients"),
        (torch.arange(2), 2.0, TypeError, "clients"),
    ],
)
def test_bad_labels_and_clients(name: str, labels: Tensor, clients: int, error: type[Exception], match: str) -> None:
    words = f"domains {match}" if name == "by_domain" and match == "must not be empty" else match
    refused(lambda: ALL[name](labels, clients), error, words)


def test_iid_is_even() -> None:
    labels = balanced(2, 1005)
    parts = partition.iid(labels, 4)
    assert [len(p) for p in parts] == [503, 503, 502, 502]
    assert [len(p) for p in partition.iid(labels[:3], 3)] == [1, 1, 1]
    refused(lambda: partition.iid(torch.zeros(2).long(), 3), ValueError, "3 clients cannot share 2 images")
    for part, words in ((torch.ones(2) > 0, "got a mask"), (torch.ones(2), "class indices .* got torch.float32")):
        refused(lambda p=part: partition.summary(torch.arange(3), [[], p]), TypeError, rf"^partition\[1\] .*{words}")


def test_exactly_the_minimum_is_enough() -> None:
    assert len(partition.dirichlet(torch.zeros(5, dtype=torch.long), 1, 1.0, min_size=5, tries=1)[0]) == 5
    even = partition.dirichlet(torch.zeros(11, dtype=torch.long), 4, 1e6, min_size=2, tries=1)
    assert [len(part) for part in even] == [2, 3, 3, 3]  # 2.75, 5.5 and 8.25 are rounded down


@pytest.mark.parametrize("clients", [2, 5])
def test_client_that_reached_the_cap_exactly_is_full(clients: int) -> None:
    """With a tiny alpha every class goes to one client as a whole, and a class has as many images as a client may."""
    labels = balanced(clients, 20)
    for seed in range(10):
        parts = partition.dirichlet_capped(labels, clients, 1e-6, min_size=0, generator=seed)
        assert [len(part) for part in parts] == [20] * clients
    labels = uneven(8, 10)
    counts = partition.summary(labels // 3, partition.dirichlet_capped(labels, clients, 0.3, min_size=0))
    full = counts.cumsum(1) - counts >= len(labels) / clients
    assert set(counts[full].tolist()) == {0}


def test_client_below_a_cap_that_is_no_integer_gets_more() -> None:
    """Two clients may have 4.5 of nine images, so that one with four images is not full."""
    labels = torch.tensor([0] * 4 + [1] * 4 + [2])
    draws = [partition.dirichlet_capped(labels, 2, 1e-6, min_size=0, generator=seed) for seed in range(40)]
    sizes = [[len(part) for part in parts] for parts in draws]
    assert [8, 1] in sizes or [9, 0] in sizes


def assert_best_of_all_draws(call: Callable[[int], object]) -> None:
    """Assert that a refusal after more draws of one seed states a better one, or the same."""
    best = []
    for tries in range(1, 13):
        with pytest.raises(ValueError, match=f"none of {tries} draws at alpha=0.3 gave all") as raised:
            call(tries)
        best += [int(found) for found in re.findall(r"(?:got|had) (\d+)\)", str(raised.value))]
    assert (best, len(best)) == (sorted(best), 12)
    assert best[0] < best[-1]


@pytest.mark.parametrize("maker", [partition.dirichlet, partition.dirichlet_capped])
def test_impossible_dirichlet_requests_are_refused(maker: Callable[..., list[Tensor]]) -> None:
    labels = balanced(2, 50)
    refused(lambda: maker(labels, 5, 1.0, min_size=21), ValueError, "100 images cannot give 5 clients at least 21 each")
    call = partial(maker, labels, 4, 1e-5, min_size=25, tries=7)
    refused(call, ValueError, "none of 7 draws at alpha=1e-05 gave all 4 clients .*raise alpha")
    for alpha in (0.0, -1.0, float("nan"), 1e9, 9e-7):
        refused(partial(maker, labels, 5, alpha), ValueError, "alpha must be")
    assert_best_of_all_draws(lambda tries: maker(labels, 4, 0.3, min_size=25, tries=tries))
    refused(lambda: maker(labels, 5, 1.0, min_size=-1), ValueError, "^min_size must be at least 0, got -1")
    refused(lambda: maker(labels, 5, 1.0, tries=0), ValueError, "^tries must be at least 1, got 0")


def test_prior_partition_follows_a_prior_until_classes_run_out() -> None:
    labels = balanced(5, 200)
    even = partition.summary(labels, partition.dirichlet_prior(labels, 10, 1e6))
    assert (even.float().mean(0) == 20).all()
    assert (even - 20).abs().max() <= 15
    rare = torch.arange(1000) // 900  # a prior does not depend on the sizes of the classes
    assert abs(int(partition.summary(rare, partition.dirichlet_prior(rare, 20, 1e6))[0, 0]) - 25) <= 15
    skewed = partition.summary(labels, partition.dirichlet_prior(labels, 5, 1e-6))
    assert skewed[0].max() == 200
    draws = [partition.dirichlet_prior(labels, 20, 1e-6, generator=seed) for seed in range(60)]
    main = [partition.summary(labels, parts).argmax(1) for parts in draws]
    assert 2 < sum(int(one[0] == one[1]) for one in main) < 24, "each client has a prior of its own: 12 of 60 are equal"
    few, one = torch.zeros(2).long(), torch.zeros(40).long()
    refused(lambda: partition.dirichlet_prior(few, 3, 1.0), ValueError, "3 clients cannot share 2 images")
    assert not torch.equal(*(partition.dirichlet_prior(one, 2, 1.0, generator=seed)[0] for seed in (0, 1)))


@given(seed=st.integers(0, 10**6), k=st.integers(1, 6), clients=st.integers(2, 9))
def test_classes_per_client(seed: int, k: int, clients: int) -> None:
    """No class is left out, even if there are fewer clients than classes, with just enough classes each."""
    labels, k = uneven(6, 20, seed), k if clients >= 6 else -(-6 // clients)
    counts = partition.summary(labels // 3, partition.classes_per_client(labels, clients, k, generator=seed))
    assert ((counts > 0).sum(1) == k).all()
    assert (counts[torch.arange(clients), torch.arange(clients) % 6] > 0).all()
    for column, size in zip(counts.T, labels.unique(return_counts=True)[1].tolist(), strict=True):
        owned = column[column > 0].tolist()
        assert owned == shares(size, len(owned) or 1)


def test_the_other_classes_of_a_client_are_uniform() -> None:
    labels = balanced(4, 2000)
    counts = partition.summary(labels, partition.classes_per_client(labels, 1200, 2))
    others = (counts[::4, 1:] > 0).sum(0)
    assert others.sum() == 300
    assert (others > 70).all()
    draws = [partition.classes_per_client(balanced(6, 9), 3, 4, generator=seed) for seed in range(20)]
    owns = [partition.summary(balanced(6, 9), parts) > 0 for parts in draws]
    assert max(int((one[1] & one[2]).sum()) for one in owns) > 2  # classes that have owners are equally likely


def test_impossible_class_counts_are_refused() -> None:
    labels = balanced(6, 20)
    for clients, k in ((2, 2), (1, 4)):
        words = f"{clients} clients with {k} classes each cannot own all 6"
        refused(partial(partition.classes_per_client, labels, clients, k), ValueError, words)
    refused(lambda: partition.classes_per_client(labels, 8, 7), ValueError, "k must be at most .* classes, 6, got 7")
    with pytest.raises(ValueError, match="class 5 has 2 images for 3 clients"):
        partition.classes_per_client(torch.tensor([9, 5, 9, 5, 9]), 6, 1)
    refused(lambda: partition.classes_per_client(labels, 8, 0), ValueError, "k must be at least 1")


@given(k=st.integers(1, 3), clusters=st.integers(1, 3), times=st.integers(1, 3), more=st.integers(0, 2))
def test_class_clusters_of_the_paper(k: int, clusters: int, times: int, more: int) -> None:
    labels = uneven(k * clusters, 20)
    clients, sizes = clusters * times + min(more, clusters - 1), labels.unique(return_counts=True)[1].tolist()
    counts = partition.summary(labels // 3, partition.class_clusters(labels, clients, k))
    wanted = torch.zeros_like(counts)
    for c, size in enumerate(sizes):
        owners = [i for i in range(clients) if i % clusters == c // k]
        wanted[owners, c] = torch.tensor(shares(size, len(owners)))
    assert torch.equal(counts, wanted)


def test_impossible_clusters_are_refused() -> None:
    labels = balanced(10, 50)
    refused(lambda: partition.class_clusters(labels, 10, 3), ValueError, "k must divide .* classes, 10, got 3")
    refused(lambda: partition.class_clusters(labels, 4, 2), ValueError, "4 clients cannot own 5 clusters of 2 classes")
    refused(lambda: partition.class_clusters(torch.tensor([3, 4, 4]), 2, 2), ValueError, "3 has 1 images for 2 clients")


@given(classes=st.integers(2, 4), times=st.integers(1, 3), share=st.sampled_from([0.5, 0.85, 1.0]))
def test_clients_of_one_dominant_class_divide_its_share(classes: int, times: int, share: float) -> None:
    labels, clients = uneven(classes, 20), classes * times
    counts = partition.summary(labels // 3, partition.dominant_class(labels, clients, share))
    for c, size in enumerate(labels.unique(return_counts=True)[1].tolist()):
        owner = torch.arange(clients) % classes == c
        assert counts[owner, c].tolist() == shares(round(share * size), times)
        others = torch.tensor(shares(size - round(share * size), clients - times))
        assert torch.equal(counts[~owner, c], others.roll(c))  # not always the first ones get one more


def test_dominant_class_of_few_images() -> None:
    labels = 3 * balanced(2, 100) + 4
    alone = partition.summary(labels[labels == 4], partition.dominant_class(labels[labels == 4], 2, 0.8))
    assert alone[:, 4].tolist() == [50, 50]
    refused(lambda: partition.dominant_class(labels, 3), ValueError, "multiple of the number of classes, 2, got 3")
    with pytest.raises(ValueError, match=r"class 4 has 100 images; 0\.01 of them is too few for its 2 owners"):
        partition.dominant_class(labels, 4, 0.01)
    assert partition.summary(labels, partition.dominant_class(labels, 4, 0.02))[:, 4].tolist() == [1, 49, 1, 49]
    for share in (0.0, 1.1):
        refused(partial(partition.dominant_class, labels, 4, share), ValueError, "share must be")


def test_by_domain() -> None:
    domains = torch.tensor([7, 3, 3, 7, 9, 3, 7])
    assert [part.tolist() for part in partition.by_domain(domains)] == [[1, 2, 5], [0, 3, 6], [4]]
    twice = partition.by_domain(torch.tensor([0, 1] * 10), 4)
    assert [len(part) for part in twice] == [5, 5, 5, 5]
    assert [int(part[0]) % 2 for part in twice] == [0, 1, 0, 1]
    first, second = (one[0] for one in (twice, twice[1:]))
    assert not torch.equal(first + 1, second)  # each domain is shuffled anew
    refused(lambda: partition.by_domain(domains, 4), ValueError, "multiple of the number of domains, 3, got 4")
    refused(lambda: partition.by_domain(domains, 6), ValueError, "domain 9 has 1 images for 2 clients")
    refused(lambda: partition.by_domain(domains.float()), TypeError, "domains")


@given(
    counts=st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), min_size=1, max_size=4),
    size=st.integers(1, 30),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("keep", ["shares", "even"])
def test_cap_size_keeps_expected_numbers(keep: Any, counts: list[list[int]], size: int, seed: int) -> None:
    labels = torch.cat([torch.arange(3).repeat_interleave(torch.tensor(c)) for c in counts])
    if not len(labels):
        return
    whole = list(torch.arange(len(labels)).split([sum(c) for c in counts]))
    kept = partition.cap_size(labels, whole, size, keep=keep, generator=seed)  # type: ignore[arg-type]
    again = partition.cap_size(labels, whole, size, keep=keep, generator=seed)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    for had, part, n in zip(whole, kept, counts, strict=True):
        assert torch.equal(part, part.sort().values)
        assert set(part.tolist()) <= set(had.tolist())
        assert len(part) == min(size, len(had))
        left = torch.bincount(labels[part], minlength=3).tolist()
        if len(had) <= size:
            continue
        if keep == "shares":
            assert all(abs(got - size * held / sum(n)) < 1 for got, held in zip(left, n))
            rest = sorted((got - size * held / sum(n)) for got, held in zip(left, n))
            assert rest[-1] - rest[0] <= 1 + 1e-9  # the largest remainders are rounded up
        else:
            assert all(got == held or got >= max(left) - 1 for got, held in zip(left, n))


def test_cap_size_draws_the_kept_images() -> None:
    labels, halves = torch.zeros(80, dtype=torch.long), torch.arange(80).split(40)
    (one, twin), (other, _) = (partition.cap_size(labels, halves, 20, generator=seed) for seed in (0, 1))
    assert not any(torch.equal(one, drawn) for drawn in (twin - 40, other, torch.arange(20)))
    assert [len(partition.cap_size(labels, [torch.arange(n)], 20)[0]) for n in (19, 20, 21)] == [19, 20, 20]
    refused(lambda: partition.cap_size(labels, [torch.arange(40)], 0), ValueError, "size must be at least 1")
    refused(lambda: partition.cap_size(labels, [torch.arange(40)], 5, keep="all"), ValueError, "keep")
    with pytest.raises(ValueError, match=r"partition must hold indices in \[0, 80\), got 80 to 80 for client 1"):
        partition.cap_size(labels, [torch.arange(40), torch.tensor([80])], 5)
    refused(lambda: partition.cap_size(labels, [], 5), ValueError, "at least one client")


@pytest.mark.parametrize("name", ALL)
@given(seed=st.integers(0, 10**6), each=st.integers(20, 40))
def test_applied_to_another_set_a_partition_keeps_every_clients_mix(name: str, seed: int, each: int) -> None:
    labels, rng = uneven(4, each, seed), derive(seed, "other")
    other = 3 * torch.multinomial(torch.tensor([4.0, 0, 1, 2, 8]), 600, replacement=True, generator=rng) + 2
    other = torch.cat([other[other != 5], torch.tensor([5, 1, 5, 5, 5, 5, 5])])
    parts = ALL[name](labels, 8, generator=seed)
    made = partition.apply(labels, parts, other, generator=seed)
    assert all(part.dtype == torch.int64 and torch.equal(part, part.unique()) for part in made)
    assert len(torch.cat(made)) == len(torch.cat(made).unique())
    before, after = partition.summary(labels, parts, 15), partition.summary(other, made, 15)
    left = torch.bincount(other, minlength=15) - after.sum(0)
    for own, found in zip(before.tolist(), after.tolist(), strict=True):
        scale = min(Fraction(int((other == k).sum()), sum(b[k] for b in before.tolist())) for k in range(15) if own[k])
        assert all(abs(n - m * scale) < 1 for n, m in zip(found, own, strict=True))
        assert sum(found) <= scale * sum(own)
        up = [m * scale % 1 for n, m in zip(found, own, strict=True) if n > m * scale]
        down = [m * scale % 1 for n, m, rest in zip(found, own, left, strict=True) if n < m * scale and rest]
        assert min(up, default=1) >= max(down, default=0)  # the largest remainders, while a class has images
    taken = labels[torch.cat(parts)]
    assert torch.equal(partition.summary(taken, partition.apply(labels, parts, taken), 15), before)
    twice = torch.cat([taken, taken])
    assert torch.equal(partition.summary(twice, partition.apply(labels, parts, twice), 15), 2 * before)
    assert all(map(torch.equal, made, partition.apply(labels, parts, other, generator=seed)))
    again = partition.apply(labels, parts, other, generator=seed + 1)
    assert torch.equal(partition.summary(other, again, 15), after)
    assert not all(torch.equal(a, b) for a, b in zip(made, again))


def test_a_partition_by_users_gives_users_all_their_other_images() -> None:
    users, other = torch.tensor([7, 7, 7, 2, 9, 9]), torch.tensor([9, 2, 2, 7, 2, 4])
    made = partition.apply(users, [*partition.by_domain(users), torch.tensor([], dtype=torch.long)], other)
    assert [part.tolist() for part in made] == [[1, 2, 4], [3], [0], []]
    assert partition.apply(users, [users[:0]], other)[0].dtype == torch.int64
    begun, many = time.process_time(), torch.arange(20_000) % 5000
    assert sum(map(len, partition.apply(many, partition.by_domain(many), many))) == 20_000
    assert time.process_time() - begun < 10
    for k in (2, 7):
        with pytest.raises(ValueError, match=f"other has no image of class {k}, .* pass a set with all classes"):
            partition.apply(users, partition.by_domain(users), other[other != k])
    assert list(map(len, partition.apply(users * 0, [[0, 1], [2, 3, 5]], other * 0))) == [2, 3]  # type: ignore[list-item]
    alone = partition.apply(torch.arange(12) // 10, [torch.arange(12)], torch.arange(7) // 5)  # a half, and both
    assert torch.bincount((torch.arange(7) // 5)[alone[0]]).tolist() == [5, 1]
    refused(lambda: partition.apply(users[:3], partition.by_domain(users), other), ValueError, "made for another set")
    refused(lambda: partition.apply(users, partition.by_domain(users), torch.rand(6, 2)), TypeError, "other must be")


def test_summary_counts() -> None:
    labels = torch.tensor([0, 2, 2, 0])
    parts = [torch.tensor([1, 2]), torch.tensor([0]), torch.tensor([], dtype=torch.long)]
    assert partition.summary(labels, parts).tolist() == [[0, 0, 2], [1, 0, 0], [0, 0, 0]]
    assert partition.summary(labels, parts, 5).shape == (3, 5)
    assert partition.summary(labels[:0], parts[2:]).tolist() == [[0]]
    refused(lambda: partition.summary(labels, parts, 2), ValueError, "below num_classes=2")
    refused(lambda: partition.summary(labels, []), ValueError, "at least one client")


def test_one_set_per_client() -> None:
    data = LabeledImages(torch.arange(6.0).view(6, 1, 1, 1), torch.arange(6) % 3, info={"dataset": "x", "client": 7})
    first, empty = client_sets(data, [torch.tensor([1, 3]), []])
    assert first.images.flatten().tolist() == [1, 3]
    assert first.labels.tolist() == [1, 0]
    assert (first.num_classes, empty.num_classes, len(empty)) == (3, 3, 0)
    assert first.info == {"dataset": "x", "client": 0, "clients": 2}
    refused(lambda: client_sets(data, [torch.tensor([0, 6])]), ValueError, r"indices in \[0, 6\), got 0 to 6")
    refused(lambda: client_sets(data, [torch.tensor([0, 1, 0]), [1]]), ValueError, "but repeats 2 indices")  # type: ignore[list-item]
    refused(lambda: client_sets(data, []), ValueError, "at least one client")


@given(
    seed=st.integers(0, 10**6),
    total=st.integers(1, 4),
    parts=st.integers(1, 4),
    least=st.sampled_from([0, 1, 5]),
    alpha=st.sampled_from([0.5, 2.0]),
)
def test_domains_by_dirichlet_respects_the_minimum_per_class(
    seed: int, total: int, parts: int, least: int, alpha: float
) -> None:
    rng = derive(seed)
    labels = torch.arange(total * 3 * 40) % 3
    domains = (torch.arange(len(labels)) // 120)[torch.randperm(len(labels), generator=rng)]
    if min(int((labels[domains == d] == k).sum()) for d in range(total) for k in range(3)) < parts * least:
        return
    assigned = partition.domains_by_dirichlet(labels, domains, parts, alpha, min_each=least, generator=seed)
    assert torch.cat(assigned).sort().values.tolist() == list(range(len(labels)))
    assert int(partition.summary(labels, assigned, 3).min()) >= least
    assert all(torch.equal(part, part.sort().values) for part in assigned)
    assert all(set(domains[part].tolist()) <= {i % total} for i, part in enumerate(assigned))
    again = partition.domains_by_dirichlet(labels, domains, parts, alpha, min_each=least, generator=seed)
    assert all(torch.equal(a, b) for a, b in zip(assigned, again))


def test_domains_are_divided_in_proportions_of_their_own() -> None:
    labels, domains = torch.arange(600) % 3, torch.arange(600) // 300
    first, second, *_ = partition.summary(labels, partition.domains_by_dirichlet(labels, domains, 2, min_each=0), 3)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_each": 6, "parts": 4}, "domain 5 has 20 images of class 1, too few for 4 clients with at least 6 each"),
        ({"min_each": 10, "alpha": 0.01, "tries": 3}, "none of 3 draws at alpha=0.01 gave all 2 parts of 20 images"),
        ({"alpha": 0.0}, "alpha must be"),
        ({"parts": 0}, "parts must be at least 1, got 0"),
    ],
)
def test_impossible_splits_of_domains_are_refused(options: dict[str, Any], words: str) -> None:
    labels, domains = 3 * (torch.arange(80) % 2) + 1, 5 + torch.arange(80) // 40
    with pytest.raises(ValueError, match=words):
        partition.domains_by_dirichlet(labels, domains, **{"parts": 2, "alpha": 2.0, "min_each": 1, **options})
    assert_best_of_all_draws(lambda n: partition.domains_by_dirichlet(labels, domains, 2, 0.3, min_each=10, tries=n))
    refused(lambda: partition.domains_by_dirichlet(labels[:9], domains, 2), ValueError, "one entry per image")
    draws = [partition.domains_by_dirichlet(labels, domains, 2, min_each=0, generator=seed) for seed in range(20)]
    assert {len(one[0]) < len(one[2]) for one in draws} == {True, False}  # two clients of one domain
    absent = torch.arange(80) // 40 + domains - 5  # class 0 in domain 5 alone
    call = partial(partition.domains_by_dirichlet, absent, domains, 2, min_each=1)
    refused(call, ValueError, "domain 5 has 0 images of class 2")
    assert len(partition.domains_by_dirichlet(absent, domains, 2, min_each=0)) == 4
