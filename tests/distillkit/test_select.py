from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distillkit.select import centroid_distances, kmeans_balance, prune_by_confidence, select


def pool(n: int, classes: int = 4, d: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return embeddings and logits without ties, with some rare classes."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=g) + torch.arange(classes) * 0.4
    return torch.randn(n, d, generator=g), logits


pools = st.builds(pool, st.integers(1, 60), st.integers(2, 5), st.integers(1, 3), st.integers(0, 999))
orders = st.sampled_from(["easy", "hard", "mixed"])


def is_selection(indices: Tensor, n: int) -> bool:
    found = indices.tolist()
    return indices.dtype == torch.int64 and found == sorted(set(found)) and set(found) <= set(range(n))


# K-means balancing


def slow_balance(distances: list[float], predicted: list[int], keep: int, order: str, balancing: float) -> set[int]:
    """The two steps of Algorithm 2, one pick at a time."""

    def pick(candidates: list[int], turn: int) -> int:
        near = order == "easy" or (order == "mixed" and turn % 2 == 0)
        return (min if near else max)(candidates, key=lambda i: (distances[i], i))

    chosen: set[int] = set()
    minimum = math.floor(balancing * keep / len(set(predicted)))
    for c in set(predicted):
        for turn in range(minimum):
            left = [i for i, p in enumerate(predicted) if p == c and i not in chosen]
            if left:
                chosen.add(pick(left, turn))
    turn = 0
    while len(chosen) < keep:
        chosen.add(pick([i for i in range(len(predicted)) if i not in chosen], turn))
        turn += 1
    return chosen


@given(pools, st.data(), orders, st.floats(0, 1), st.integers(1, 5))
def test_balancing_equals_the_slow_algorithm(
    drawn: tuple[Tensor, Tensor], data: st.DataObject, order: str, balancing: float, clusters: int
) -> None:
    embeddings, logits = drawn
    predicted, keep = logits.argmax(1), data.draw(st.integers(1, len(logits)))
    got = kmeans_balance(embeddings, predicted, keep=keep, clusters=clusters, order=order, balancing=balancing)
    assert is_selection(got, len(logits))
    assert len(got) == keep
    distances = centroid_distances(embeddings, clusters=clusters).tolist()
    assert set(got.tolist()) == slow_balance(distances, predicted.tolist(), keep, order, balancing)


@pytest.mark.parametrize("batch_size", [None, 64])
def test_distances_are_to_the_nearest_centroid(batch_size: int | None) -> None:
    g = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    embeddings = centres.repeat(40, 1) + torch.randn(120, 2, generator=g)
    slow = torch.empty(120)
    for k in range(3):
        slow[k::3] = (embeddings[k::3] - embeddings[k::3].mean(0)).norm(dim=1)
    got = [centroid_distances(embeddings, clusters=3, batch_size=batch_size, generator=seed) for seed in range(6)]
    near = min(float((distances - slow).abs().max()) for distances in got)
    assert near < (1e-4 if batch_size is None else 0.5)  # mini-batches only come near the means
    assert got[0].dtype == torch.float64
    options = [(batch_size, 1), (batch_size, 2), (batch_size and 8, 1)]
    other = [centroid_distances(embeddings, clusters=9, batch_size=b, generator=g).sum() for b, g in options]
    assert len({*map(float, other)}) == (2 if batch_size is None else 3)
    exact = 1e7 + torch.randn(40, 2, generator=g, dtype=torch.float64)
    torch.testing.assert_close(centroid_distances(exact, clusters=1), (exact - exact.mean(0)).norm(dim=1))


def test_keeping_all_images_ranks_none() -> None:
    embeddings, logits = pool(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of too many clusters
        assert kmeans_balance(embeddings, logits.argmax(1), keep=9).tolist() == list(range(9))


def test_more_clusters_than_images_give_each_its_own() -> None:
    embeddings, _ = pool(9)
    for clusters in (9, 1000):
        with pytest.warns(UserWarning, match=f"clusters={clusters} for 9 embeddings: each is its own centroid"):
            assert float(centroid_distances(embeddings, clusters=clusters).max()) == pytest.approx(0, abs=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(centroid_distances(embeddings, clusters=8).max()) > 1e-3


# Pruning


def slow_confidence(row: list[float], measure: str) -> float:
    top = max(row)
    weights = [math.exp(z - top) for z in row]
    p = [w / math.fsum(weights) for w in weights]
    if measure == "max_logit":
        return top
    return max(p) if measure == "max_softmax" else math.fsum(q * math.log(q) for q in p if q)


@given(pools, st.floats(0, 0.99), st.sampled_from(["top", "bottom"]), st.sampled_from(["max_softmax", "entropy"]))
def test_pruning_equals_the_slow_rule(
    drawn: tuple[Tensor, Tensor], threshold: float, strategy: str, measure: str
) -> None:
    logits = drawn[1].double()
    rows = logits.tolist()
    expected: set[int] = set()
    for c in range(logits.shape[1]):
        members = [i for i, row in enumerate(rows) if row.index(max(row)) == c]
        members.sort(key=lambda i: slow_confidence(rows[i], measure), reverse=strategy == "top")
        expected |= set(members[int(threshold * len(members)) :])
    got = prune_by_confidence(logits, threshold=threshold, strategy=strategy, measure=measure)
    assert is_selection(got, len(rows))
    assert set(got.tolist()) == expected


@given(pools, st.data(), st.sampled_from(["top", "bottom", "random"]), st.booleans())
def test_keep_is_exact_and_no_class_disappears(
    drawn: tuple[Tensor, Tensor], data: st.DataObject, strategy: str, per_class: bool
) -> None:
    logits = drawn[1]
    n, predicted = len(logits), logits.argmax(1)
    keep = data.draw(st.integers(1, n))
    got = prune_by_confidence(logits, keep=keep, strategy=strategy, per_class=per_class)
    assert is_selection(got, n)
    assert len(got) == keep
    if per_class:
        kept = torch.bincount(predicted[got], minlength=logits.shape[1])
        sizes = torch.bincount(predicted, minlength=logits.shape[1])
        ceiling = sizes - sizes * (n - keep) // n
        assert bool((kept <= ceiling).all())
        if keep >= int((sizes > 0).sum()):
            assert bool(((kept > 0) == (sizes > 0)).all())


def test_measures_disagree_where_expected() -> None:
    # Largest probability 0.5 and 0.48, but the first spreads the rest over nine classes: more entropy.
    p = torch.tensor([[0.5] + [0.5 / 9] * 9, [0.48, 0.44] + [0.01] * 8])
    assert prune_by_confidence(p.log(), keep=1, measure="max_softmax").tolist() == [1]
    assert prune_by_confidence(p.log(), keep=1, measure="entropy").tolist() == [0]
    shifted = p.log() + torch.tensor([[0.0], [7.0]])
    assert prune_by_confidence(shifted, keep=1, measure="max_softmax").tolist() == [1]
    assert prune_by_confidence(shifted, keep=1, measure="max_logit").tolist() == [0]


def test_saturated_float32_logits_are_still_ranked() -> None:
    logits = torch.tensor([[30.0, 0.0], [20.0, 0.0], [25.0, 0.0]])  # the softmax rounds to 1 in float32 for all three
    assert prune_by_confidence(logits, keep=1).tolist() == [1]
    assert prune_by_confidence(torch.zeros(99, 2), keep=33).tolist() == list(range(66, 99))  # ties


def test_random_pruning_is_without_replacement_and_seeded() -> None:
    logits = torch.zeros(1000, 2)
    kept = prune_by_confidence(logits, threshold=0.9, strategy="random")
    assert len(kept) == 100
    assert torch.equal(kept, prune_by_confidence(logits, threshold=0.9, strategy="random"))
    other = prune_by_confidence(logits, threshold=0.9, strategy="random", generator=1)
    assert not torch.equal(kept, other)
    assert 20 < int((kept < 500).sum()) < 80


def test_without_classes_the_most_confident_class_is_pruned_first() -> None:
    logits = torch.cat([torch.tensor([[5.0 + i / 10, 0.0] for i in range(5)]), torch.tensor([[0.0, 1.0]] * 5)])
    assert prune_by_confidence(logits, keep=5, per_class=False).tolist() == [5, 6, 7, 8, 9]
    assert int((prune_by_confidence(logits, keep=5) < 5).sum()) in (2, 3)


# Both


@given(pools, st.data(), st.floats(0, 1))
def test_select_keeps_the_right_number(drawn: tuple[Tensor, Tensor], data: st.DataObject, share: float) -> None:
    embeddings, logits = drawn
    keep = data.draw(st.integers(1, len(logits)))
    got = select(embeddings, logits, keep=keep, kmeans_share=share, clusters=3)
    assert is_selection(got, len(logits))
    assert len(got) == keep


@pytest.mark.parametrize(
    ("balance", "prune"),
    [({}, {}), ({"order": "easy", "balancing": 0.0, "batch_size": 16}, {"measure": "max_logit", "strategy": "bottom"})],
)
def test_select_equals_balancing_then_pruning(balance: dict[str, Any], prune: dict[str, Any]) -> None:
    embeddings, logits = pool(200)
    balanced = kmeans_balance(embeddings, logits.argmax(1), keep=101, clusters=7, **balance)  # 100.995
    expected = balanced[prune_by_confidence(logits[balanced], keep=51, **prune)]
    assert torch.equal(select(embeddings, logits, keep=51, clusters=7, **balance, **prune), expected)
    for options in (balance, prune):
        for name in options:  # each has an effect
            fewer = {n: v for n, v in (balance | prune).items() if n != name}
            assert not torch.equal(select(embeddings, logits, keep=51, clusters=7, **fewer), expected), name


def test_share_zero_is_pruning_alone_and_one_is_kmeans_alone() -> None:
    embeddings, logits = pool(60)
    only_pruned = select(embeddings, logits, keep=20, kmeans_share=0.0, clusters=4)
    assert torch.equal(only_pruned, prune_by_confidence(logits, keep=20))
    only_balanced = select(embeddings, logits, keep=20, kmeans_share=1.0, clusters=4)
    assert torch.equal(only_balanced, kmeans_balance(embeddings, logits.argmax(1), keep=20, clusters=4))


def test_released_rule_below_the_pool_size() -> None:
    embeddings, logits = pool(300)
    got = select(embeddings, logits, keep=50, threshold=0.5, clusters=5)
    balanced = kmeans_balance(embeddings, logits.argmax(1), keep=100, clusters=5)
    assert torch.equal(got, balanced[prune_by_confidence(logits[balanced], threshold=0.5)])


def test_the_released_rule_prunes_alone_at_the_published_budget_and_defaults_are_the_papers() -> None:
    embeddings, logits = pool(500)
    predicted, alone = logits.argmax(1), prune_by_confidence(logits, threshold=0.9)
    assert torch.equal(select(embeddings, logits, keep=50, threshold=0.9, clusters=5), alone)
    assert torch.equal(prune_by_confidence(logits, threshold=0.9, strategy="top", measure="max_softmax"), alone)
    given = {o: kmeans_balance(embeddings, predicted, keep=50, clusters=5, order=o) for o in ("easy", "hard")}
    default = kmeans_balance(embeddings, predicted, keep=50, clusters=5)
    assert torch.equal(default, given["hard"])
    assert not torch.equal(default, given["easy"])
    assert torch.equal(default, kmeans_balance(embeddings, predicted, keep=50, clusters=5, balancing=1.0))
    steps = [select(embeddings, logits, keep=50, clusters=5, **own) for own in ({}, {"kmeans_share": 0.5})]
    assert torch.equal(*steps)


def test_equal_seeds_give_equal_selections_without_global_draws(global_rng_untouched: None) -> None:
    embeddings, logits = pool(80)
    options: dict[str, Any] = {"keep": 30, "clusters": 8, "strategy": "random"}
    first = select(embeddings, logits, **options, generator=3)
    assert torch.equal(first, select(embeddings, logits, **options, generator=3))
    assert not torch.equal(first, select(embeddings, logits, **options, generator=4))
    for own in ({"kmeans_share": 0.0}, {"strategy": "top"}):
        one, two = (select(embeddings, logits, **options | own, generator=seed) for seed in (3, 4))
        assert not torch.equal(one, two)
    generator = torch.Generator().manual_seed(0)
    select(embeddings, logits, **options, generator=generator)
    assert generator.get_state().tolist() != torch.Generator().manual_seed(0).get_state().tolist()


E_, L_ = pool(10)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: select(E_, L_, keep=11), ValueError, "keep must be at most 10, got 11$"),
        (lambda: select(E_[:9], L_, keep=2), ValueError, "^embeddings and logits must .*, got 9 and 10 rows$"),
        (lambda: select(E_, L_[:9], keep=2), ValueError, "10 and 9 rows"),
        (lambda: prune_by_confidence(L_, keep=11), ValueError, "keep must be at most 10"),
        (lambda: select(E_, L_, keep=2, kmeans_share=1.5), ValueError, r"kmeans_share must be in \[0, 1\], got 1.5"),
        (lambda: select(E_, L_, keep=2, threshold=1.0), ValueError, "threshold must be less than 1"),
        (lambda: select(E_, L_[:, :1], keep=2), ValueError, "at least 2 columns"),
        (lambda: kmeans_balance(E_, L_.argmax(1), keep=2, balancing=1.1), ValueError, "balancing must be in .*got 1.1"),
        (lambda: kmeans_balance(E_, L_.argmax(1)[:9], keep=2), ValueError, "predicted must have .* got 9 for 10"),
        (lambda: kmeans_balance(E_, L_, keep=2), TypeError, "predicted"),
        (lambda: prune_by_confidence(L_), ValueError, "either keep or threshold"),
        (lambda: prune_by_confidence(L_, keep=2, threshold=0.5), ValueError, "got keep=2 and threshold=0.5$"),
        (lambda: prune_by_confidence(L_, threshold=1.0), ValueError, "threshold must be less than 1"),
        (lambda: prune_by_confidence(L_, threshold=-0.1), ValueError, "threshold"),
        (lambda: centroid_distances(E_, batch_size=0), ValueError, "batch_size must be at least 1, got 0"),
    ],
)
def test_invalid_input_is_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
