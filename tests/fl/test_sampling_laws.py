"""Laws of the random draws of a run: clients, pairs of clients and the order of batches are drawn uniformly."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import pytest
from scipy.stats import chisquare

from distillkit.rng import derive
from fl.batches import shuffled_indices
from fl.engine._rounds import draw_clients

ROUNDS, LEVEL = 3000, 1e-4
"""A correct draw fails one of these tests with probability `LEVEL`; the seed is fixed, so it fails always or never."""


def draws(clients: int, wanted: int) -> list[list[int]]:
    return [draw_clients(clients, wanted, 11, number) for number in range(1, ROUNDS + 1)]


@pytest.mark.parametrize(("clients", "wanted"), [(2, 1), (5, 1), (5, 2), (6, 5), (10, 3)])
def test_clients_and_pairs_are_drawn_equally_often(clients: int, wanted: int) -> None:
    found = draws(clients, wanted)
    assert draw_clients(clients, clients, 11, 1) == list(range(clients))
    assert all(len(set(d)) == wanted and d == sorted(d) and set(d) <= set(range(clients)) for d in found)
    single = Counter(c for d in found for c in d)
    # Draws without replacement vary less than independent ones, by the factor (clients - wanted) / (clients - 1).
    counts, expected = [single[c] for c in range(clients)], ROUNDS * wanted / clients
    variance = (clients - wanted) / (clients - 1)
    scaled = [expected + (n - expected) / variance**0.5 for n in counts]
    assert chisquare(scaled).pvalue > LEVEL
    if wanted == 2:
        pairs = Counter(pair for d in found for pair in combinations(d, 2))
        assert chisquare([pairs[p] for p in combinations(range(clients), 2)]).pvalue > LEVEL


def test_every_client_is_drawn_if_all_are_wanted() -> None:
    assert draws(4, 4) == [[0, 1, 2, 3]] * ROUNDS


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_every_pass_has_an_order_of_its_own(batch: int) -> None:
    """Every image is seen once in each pass, and all pairs of orders of two passes are equally likely."""
    orders = list(permutations(range(3)))
    seen: Counter[tuple[object, ...]] = Counter()
    for seed in range(ROUNDS):
        found = [i for part in shuffled_indices(3, batch, derive(seed), 2, None) for i in part.tolist()]
        seen[tuple(found[:3]), tuple(found[3:])] += 1
    pairs = [(one, other) for one in orders for other in orders]
    assert set(seen) == set(pairs)
    assert chisquare([seen[pair] for pair in pairs]).pvalue > LEVEL


def test_steps_go_over_as_many_passes_as_needed() -> None:
    parts = list(shuffled_indices(5, 2, derive(0), 1, 8))
    assert [len(part) for part in parts] == [2, 2, 1, 2, 2, 1, 2, 2]
    assert sorted(i for part in parts[:3] for i in part.tolist()) == list(range(5))
    assert [len(part) for part in shuffled_indices(5, 2, derive(0), 2, None)] == [2, 2, 1] * 2
    assert list(shuffled_indices(5, 2, derive(0), 1, 0)) == []
