"""RobustMean against its papers' formulas in NumPy, and limits on the effect of malicious replies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl import AddOn, ClientDP, FedAvg, Filtered, NoUsableReply, Run, simulate
from fl.addons import SCAFFOLD, ClientDrift, LocalAccuracy, RobustMean
from fl.addons.robust_mean import _krum_choice, _trimmed_mean
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import network
from tests.refused import refused

RULES = {
    "median": RobustMean(1),
    "trimmed": RobustMean(1, "trimmed"),
    "krum": RobustMean(1, "krum"),
    "multi-krum": RobustMean(1, "krum", best=3),
}


def scores(vectors: Any, f: int) -> list[float]:
    """s(i) = sum_{i -> j} |V_i - V_j|^2 over the n - f - 2 closest V_j, as the paper writes it."""
    n = len(vectors)
    found = []
    for i in range(n):
        others = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(n) if j != i)
        found.append(sum(others[: n - f - 2]))
    return found


def krum(vectors: Any, f: int, keep: int = 1) -> list[int]:
    """Return the `keep` vectors with the smallest scores, sorted by number."""
    score = scores(vectors, f)
    return sorted(sorted(range(len(vectors)), key=lambda i: (score[i], i))[:keep])


def combined(vectors: Any, rule: str, f: int = 1) -> Any:
    """Return the result of each rule for the rows of `vectors` with f attackers, in NumPy."""
    if rule == "median":
        return np.median(vectors, axis=0)
    if rule == "trimmed":
        return np.sort(vectors, axis=0)[f:-f].mean(0)
    return vectors[krum(vectors, f, 1 if rule == "krum" else 3)].mean(0)


class Poison(AddOn):
    """The named clients send their change times `times`."""

    key = "Poison"

    def __init__(self, *clients: int, times: float = -1e6) -> None:
        self.clients, self.times = clients, times

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        if local.client.id in self.clients:
            reply[FedAvg.update] = {n: self.times * u for n, u in update.items()}


class Witness(AddOn):
    """Keeps every change that the server receives."""

    key = "Witness"

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def read_reply(self, server: Any, reply: Any, out: Any) -> None:
        self.seen.append({n: u.double().numpy() for n, u in reply[FedAvg.update].items()})


def play(*addons: AddOn, rounds: int = 1, clients: Any = None, **options: Any) -> Run:
    how = {k: options.pop(k) for k in ("participation", "test", "initial") if k in options}
    options |= {"initial": how.pop("initial")} if "initial" in how else {}
    method = FedAvg(*addons, **{"factory": Tiny, "lr": 0.05, "weights": "uniform", **options})
    return simulate(method, clients or federation(), rounds=rounds, seed=5, progress=False, **how)


def flat(group: dict[str, Any]) -> Any:
    return np.concatenate([np.asarray(group[n], dtype=np.float64).ravel() for n in sorted(group)])


INITIAL = Tiny(3).state_dict()


def moved(run: Run) -> Any:
    state = run.server.state[FedAvg.model]
    return flat({n: (t - INITIAL[n]).numpy() for n, t in state.items()})


@pytest.mark.golden(
    "RobustMean",
    source="Yin et al., ICML 2018, median and trimmed mean; Blanchard et al., NeurIPS 2017, the Krum function; "
    "written out in NumPy of our own",
)
@pytest.mark.parametrize("poisoned", [(), (2,)])
@pytest.mark.parametrize("clients", [5, 6])
@pytest.mark.parametrize("rule", RULES)
def test_round_follows_the_formula(rule: str, clients: int, poisoned: tuple[int, ...]) -> None:
    witness = Witness()
    held = [images(12 + 3 * k, seed=k) for k in range(clients)]
    run = play(RULES[rule], witness, Poison(*poisoned, times=-3.0), clients=held, initial=INITIAL)
    vectors = np.stack([flat(u) for u in witness.seen])
    assert moved(run) == pytest.approx(combined(vectors, rule), abs=1e-6)
    assert moved(run) != pytest.approx(vectors.mean(0), abs=1e-4)
    if "krum" in rule:
        assert run.rows[0]["krum_clients"] == krum(vectors, 1, RULES[rule].best)


@pytest.mark.parametrize("poisoned", [(), (2, 5)])
@pytest.mark.parametrize("clients", [7, 8])
@pytest.mark.parametrize("rule", RULES)
def test_round_of_some_clients_with_two_attackers_follows_the_formula(
    rule: str, clients: int, poisoned: tuple[int, ...]
) -> None:
    witness = Witness()
    held = [images(12 + 3 * k, seed=k) for k in range(9)]
    addons = replace(RULES[rule], attackers=2), witness, Poison(*poisoned)
    run = play(*addons, clients=held, initial=INITIAL, participation=clients)
    assert not run.rows[0]["failed"]
    vectors = np.stack([flat(u) for u in witness.seen])
    assert moved(run) == pytest.approx(combined(vectors, rule, 2), abs=1e-6)
    assert moved(run) != pytest.approx(vectors.mean(0), abs=1e-4)
    if "krum" in rule:
        assert run.rows[0]["krum_clients"] == [run.rows[0]["drawn"][i] for i in krum(vectors, 2, RULES[rule].best)]


# Laws of the rules themselves.

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)


@st.composite
def poisoned(draw: Any, least: int) -> tuple[Any, list[int], int]:
    """(rows [n, 3], numbers of the honest ones, f): n is at least 2 f + `least`; honest values are small."""
    f = draw(st.integers(1, 3))
    n = 2 * f + least + draw(st.integers(0, 3))
    false = draw(st.sets(st.integers(0, n - 1), max_size=f))
    small = st.floats(-1, 1, width=32)
    rows = [[draw(NUMBERS if i in false else small) for _ in range(3)] for i in range(n)]
    return torch.tensor(rows), [i for i in range(n) if i not in false], f


@settings(max_examples=30, deadline=None)
@given(poisoned(least=1), st.sampled_from(["median", "trimmed"]))
def test_no_coordinate_leaves_the_hull_of_the_honest(case: tuple[Any, list[int], int], rule: str) -> None:
    rows, honest, f = case
    got = _trimmed_mean(rows, (len(rows) - 1) // 2 if rule == "median" else f)
    slack = 1e-12
    assert (got >= rows[honest].min(0).values.double() - slack).all()
    assert (got <= rows[honest].max(0).values.double() + slack).all()


@settings(max_examples=30, deadline=None)
@given(poisoned(least=3), st.floats(1.01, 1e6))
def test_krum_selects_an_honest_vector_if_attackers_are_far(case: tuple[Any, list[int], int], further: float) -> None:
    """s of an honest vector is at most (n - f - 2) d^2; of an attacker at distance D at least (n - 2 f - 1) D^2."""
    rows, honest, f = case
    rows = rows.double()
    n, d = len(rows), 2 * 3**0.5
    apart = further * d * ((n - f - 2) / (n - 2 * f - 1)) ** 0.5 + 3**0.5
    for i in set(range(n)) - set(honest):  # all false ones at one point: the best that they can do for each other
        rows[i] = torch.tensor([apart, 0.0, 0.0])
    assert _krum_choice({"a": rows[:, :1], "b": rows[:, 1:]}, f, 1)[0] in honest


@settings(max_examples=30, deadline=None)
@given(poisoned(least=3), st.randoms(use_true_random=False))
def test_order_of_the_clients_changes_nothing(case: tuple[Any, list[int], int], random: Any) -> None:
    rows, _, f = case
    order = random.sample(range(len(rows)), len(rows))
    for trim in (0, f, (len(rows) - 1) // 2):
        torch.testing.assert_close(_trimmed_mean(rows[order], trim), _trimmed_mean(rows, trim), rtol=0, atol=0)
    score = scores(rows.double().numpy(), f)
    for chosen in (_krum_choice({"": rows}, f, 1)[0], order[_krum_choice({"": rows[order]}, f, 1)[0]]):
        assert score[chosen] == pytest.approx(min(score), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_rules_equal_their_formulas(data: st.DataObject, f: int, keep: int) -> None:
    """Any number of replies, false ones and equal ones included, in any order."""
    value = st.integers(-3, 3) | st.floats(-(2.0**100), 2.0**100, width=32)
    n = data.draw(st.integers(2 * f + 3, 2 * f + 6))
    rows = np.array(data.draw(st.lists(st.tuples(*[value] * 3), min_size=n, max_size=n)))
    tensor = torch.tensor(rows)
    for trim, wanted in ((f, np.sort(rows, axis=0)[f:-f].mean(0)), ((n - 1) // 2, np.median(rows, axis=0))):
        assert _trimmed_mean(tensor, trim).numpy() == pytest.approx(wanted, rel=1e-12)
    score, chosen = scores(rows, f), _krum_choice({"a": tensor[:, :1], "b": tensor[:, 1:]}, f, keep)
    assert sorted(score[i] for i in chosen) == pytest.approx(sorted(score)[:keep], rel=1e-9)
    assert chosen == sorted(set(chosen))


def test_smaller_client_number_wins_a_tie() -> None:
    assert _krum_choice({"": torch.ones(5, 4)}, 1, 2) == [0, 1]


# Runs.


@pytest.mark.parametrize("rule", ["median", "multi-krum"])
def test_poison_that_ruins_the_mean_has_little_effect(rule: str) -> None:
    test = images(90, seed=9)
    ruined = play(Poison(3), rounds=1, test=test, max_update_norm=1e9)
    held = play(RULES[rule], Poison(3), rounds=6, test=test)
    assert ruined.server.state[FedAvg.model]["classifier.weight"].abs().max() > 1e3
    assert held.server.state[FedAvg.model]["classifier.weight"].abs().max() < 10
    assert held.accuracy_last > 0.8 > ruined.accuracy_last
    if "krum" in rule:
        assert all(3 not in row["krum_clients"] for row in held.rows)


# Refusals.


class Summed(AddOn):
    """Sends a sum of its own."""

    total = SCAFFOLD.drift


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: RobustMean(1, best=2), r"best=2 belongs to rule='krum', got rule='median'; leave it out"),
        (lambda: RobustMean(1, "trimmed", best=2), r"best=2 belongs to rule='krum', got rule='trimmed'"),
        (lambda: FedAvg(RobustMean(1), factory=Tiny), r"give weights='uniform', got 'samples'"),
        (
            lambda: FedAvg(RobustMean(1), Summed(), factory=Tiny, weights="uniform"),
            r"does not protect SCAFFOLD.drift, which combines replies by 'sum'.*leave Summed out",
        ),
        (
            lambda: Filtered(FedAvg(RobustMean(1), factory=Tiny, weights="uniform"), ClientDP(1.0, 0.5, clip=1.0)),
            r"RobustMean reads single replies on the server",
        ),
    ],
)
def test_entries_it_cannot_guard_are_refused(make: Any, error: str) -> None:
    refused(make, ValueError, error)


@pytest.mark.parametrize(
    ("rule", "shown"),
    [
        (RobustMean(3), "attackers=3, rule='median'"),
        (RobustMean(3, "trimmed"), "attackers=3, rule='trimmed'"),
        (RobustMean(2, "krum"), "attackers=2, rule='krum'"),
        (RobustMean(2, "krum", best=2), "attackers=2, rule='krum', best=2"),
        (RobustMean(1, "krum", best=6), "attackers=1, rule='krum', best=6"),
    ],
)
def test_too_few_clients_for_f_are_refused_before_round_1(rule: RobustMean, shown: str) -> None:
    said = rf"RobustMean\({shown}\) needs 7 replies a round; the run has 5 clients: lower attackers, or add clients"
    refused(lambda: play(rule), ValueError, said)
    assert rule.needed == 7


def test_round_with_too_few_replies_ends_the_run_with_the_reason() -> None:
    with pytest.raises(NoUsableReply, match="needs 5 replies a round, this one has 4: raise participation, or lower"):
        play(RobustMean(2), participation=4)


def test_buffers_kept_on_the_server_and_measurements_need_no_guard() -> None:
    assert not play(RobustMean(1), factory=network, buffers="drop").rows[0]["failed"]
    FedAvg(RobustMean(1), ClientDrift(), LocalAccuracy(), factory=Tiny, weights="uniform")
