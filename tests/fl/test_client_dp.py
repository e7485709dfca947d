"""Client-level DP (DP-FedAvg) against NumPy: noise, ledger entries and refusals."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distillkit import LabeledImages, privacy
from distillkit.privacy import ALL_CLIENTS, Event, Ledger, NotAccountable, PrivacyError, Secret, compose
from distillkit.rng import derive
from fl import Client, ClientData, ClientDP, Entry, FedAvg, FedDM, Filtered, Message, Method, Run, Server, simulate
from fl.addons import (
    MOON,
    SCAFFOLD,
    Anchors,
    Condensed,
    FedAdam,
    FedAvgM,
    FedDF,
    FedExP,
    FedGen,
    FedNova,
    FedProx,
    FineTune,
)
from fl.aggregation import AggregatedReplies, Aggregator, EntrySpec, Schema
from fl.averaging.addon import AddOn
from fl.engine._client_runtime import FAILED_PRIVATELY
from fl.engine._run_options import OWN_CODE
from fl.filters.client_dp import Adaptive
from fl.filters.filter import Filter
from fl.message import Tensors
from fl.methods import FedProto
from tests.fl import quadratic
from tests.fl.federations import Tiny, federation
from tests.fl.invariances import assert_same, tensors
from tests.refused import refused

Vector = Any
BOTH = {FedAvg.update: 0.4, SCAFFOLD.drift: 0.3}


def averaging(*addons: AddOn, **options: Any) -> FedAvg:
    return FedAvg(*addons, **{"factory": Tiny, "lr": 0.05, "batch": 6, "weights": "uniform", **options})


def play(what: Method, rounds: int = 3, clients: Any = None, **how: Any) -> Run:
    return simulate(what, clients or federation(), rounds=rounds, **{"seed": 5, "progress": False, **how})


def seeded(secret: int, round_number: int) -> Secret:
    """Return the server's generator in a seeded round."""
    generator = derive(secret, round_number, "server", "secret")
    return Secret(int(torch.randint(2**62, (), generator=generator)))


@pytest.mark.golden(
    "ClientDP", source="McMahan et al., ICLR 2018, Algorithm 1; Andrew et al., NeurIPS 2021, Algorithm 1"
)
@pytest.mark.parametrize("adaptive", [None, Adaptive(quantile=0.4, step=0.7, sigma=1.5)])
def test_rounds_follow_the_papers_in_numpy(adaptive: Adaptive | None) -> None:
    """Three clients, q = 0.6, with updates shorter and longer than C; the test draws all noise again."""
    q, sigma, clip, secret = 0.6, 0.8, 0.15, 13
    start = {"w": torch.tensor(quadratic.START, dtype=torch.float32)}
    method = averaging(
        factory=quadratic.TwoWeights, objective=quadratic.squares, initial=start, lr=0.1, momentum=0.5, batch=1
    )  # fmt: skip
    dp, ledger = ClientDP(sigma, q, clip, adaptive), Ledger()
    run = play(Filtered(method, dp), 8, quadratic.clients(), secret=secret, ledger=ledger)
    assert [(e.sigma, e.rate) for e in ledger.events] == [(sigma, q)] * 8
    w, z, cut, sizes = quadratic.START.copy(), sigma, set(), set()
    if adaptive is not None:
        z = (sigma**-2 - (2 * 1.5) ** -2) ** -0.5
    for t in range(1, 9):
        assert run.rows[t - 1]["clip_norm"] == {"FedAvg.update": pytest.approx(clip, rel=1e-6)}
        source = seeded(secret, t)
        drawn = source.poisson(3, q).tolist()
        total, bits = np.zeros(2), 0.0
        for k in drawn:
            delta = quadratic.train(k, w, quadratic.COUNTS[k], 0.1, 0.5)
            length = float(np.sqrt((delta**2).sum()))
            total += delta * min(1.0, clip / length)
            bits += (length <= clip) - 0.5
            cut.add(length > clip)
        sizes.add(len(drawn))
        w = w + source.add_noise(torch.from_numpy(total), z * clip).numpy() / (q * 3)
        if adaptive is not None:
            share = 0.5 + float(source.add_noise(torch.tensor([bits]), 1.5)) / (q * 3)
            clip *= math.exp(-0.7 * (share - 0.4))
    assert (cut, sizes) == ({True, False}, {0, 1, 2, 3})
    assert quadratic.weights(run) == pytest.approx(w, abs=5e-6)


@pytest.mark.parametrize(
    "addons",
    [(), (FedAvgM(0.9),), (FedAdam(),), (FedProx(0.1), MOON()), (SCAFFOLD(),), (FedNova(), SCAFFOLD())],
    ids=lambda a: " ".join(x.name for x in a) or "plain",
)
def test_without_noise_clip_and_sampling_equals_uniform_averaging(addons: Any) -> None:
    base = averaging(*addons)
    clip: dict[Entry[Any], float] = {FedAvg.update: 1e6}
    for addon in addons:
        clip |= {e: 1e6 for e in vars(type(addon)).values() if isinstance(e, Entry) and e.rule in ("mean", "sum")}
    plain, dp = play(base), play(Filtered(averaging(*addons), ClientDP(0.0, 1.0, clip)))
    mine, others = tensors(plain.server.state), tensors(dp.server.state)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert torch.allclose(value, others[name], atol=1e-6), name


class Sums(Method):
    """Sends replies of every kind and keeps the argument of `receive`. `sends` maps a client to its reply's factor."""

    n = Entry[float]("sum")
    group = Entry[Tensors]("mean", by=n)
    vector = Entry[Tensor]("sum")
    number = Entry[float]("mean")
    fixed = Entry[Tensor]("mean")
    extra = Entry[Tensor]("sum")
    got: AggregatedReplies
    seen: Server

    def send(self, server: Server, client: int) -> Message:
        return Message({self.n: 0.0})

    def expect(self, server: Server, client: int) -> Schema:
        return {k: EntrySpec(v) for k, v in self.reply(0.0).items() if k != self.extra.key}

    def reply(self, factor: float) -> Message:
        return Message({
            self.n: 5.0, self.group: {"a": torch.full((2, 3), factor), "b": torch.full((4,), -factor)},
            self.vector: torch.full((5,), 2 * factor), self.number: 3 * factor, self.fixed: torch.full((2,), factor),
            self.extra: torch.ones(3),
        })  # fmt: skip

    def local(self, client: Client, message: Message) -> Message:
        return self.reply(client.id + 1.0)

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        self.got, self.seen = replies, server


CLIPS = {Sums.group: 2.0, Sums.vector: 1.0, Sums.number: 0.5, Sums.fixed: 4.0}
ENTRIES: dict[str, Entry[Any]] = {e.key: e for e in (*Sums().entries(), ClientDP.norms, ClientDP.within)}


def on_server(method: Method, clients: int = 4, secret: int | None = None, delta: float = 1e-5) -> Any:
    """Return the server's side without a run."""
    return SimpleNamespace(
        method=method, clients=clients, round=1, secret=Secret(secret), ledger=Ledger(delta=delta),
        state=Message(), notes={},
    )  # fmt: skip


def as_vector(sums: Any) -> Tensor:
    parts = [t for v in sums for t in (v.values() if isinstance(v, dict) else [torch.as_tensor(v)])]
    return torch.cat([t.double().flatten() for t in parts])


def aggregate(dp: ClientDP, replies: list[Message], message: Message | None = None) -> AggregatedReplies:
    reducer = Aggregator(ENTRIES)
    for k, reply in enumerate(replies):
        reducer.fold(k, dp.out(None, message or Message(), reply))  # type: ignore[arg-type]
    return reducer.result()


factors = st.lists(st.sampled_from([0.0, 1e-12, 0.01, 0.3, 1.0, 7.0, 1e20, math.nan, math.inf]), min_size=1, max_size=6)


@given(factors, st.integers(0, 5))
def test_removing_one_client_moves_the_sums_by_at_most_the_sensitivity(sent: list[float], gone: int) -> None:
    dp = ClientDP(1.0, 0.5, CLIPS)
    replies = [Sums().reply(f) for f in sent]
    rest = replies[: gone % len(sent)] + replies[gone % len(sent) + 1 :]
    zeros = [Sums().reply(0.0)]

    def sums(of: list[Message]) -> list[Tensor]:
        reduced = aggregate(dp, of + zeros)
        return [as_vector([reduced.sum(e)]) for e in dp.clips]

    moved = [a - b for a, b in zip(sums(replies), sums(rest))]
    for difference, most in zip(moved, dp.clips.values()):
        assert float(difference.norm()) <= most * (1 + 1e-6)
    assert float(torch.cat(moved).norm()) <= math.hypot(*CLIPS.values()) * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.integers(0, 10**6), st.floats(-320, 150), st.floats(-12, 30))
def test_clipped_update_never_exceeds_the_clip(dtype: torch.dtype, seed: int, scale: float, clip: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    value = {n: (torch.randn(40, generator=draw, dtype=torch.float64) * 10**scale).to(dtype) for n in "ab"}
    sent = ClientDP(1.0, 0.5, {Sums.group: 10**clip}).out(None, Message(), Message({Sums.group: value}))  # type: ignore[arg-type]
    assert sum(Fraction(v) ** 2 for t in sent[Sums.group].values() for v in t.tolist()) <= Fraction(10**clip) ** 2


def test_released_sums_are_on_a_public_grid() -> None:
    """Multiples of 2^-20 of the noise's deviation, rounded down to a power of two; bits have a grid of their own."""
    dp = ClientDP(1.0, 0.5, CLIPS, Adaptive(sigma=2.0))
    server = on_server(Sums())
    server.state[ClientDP.norms] = torch.tensor([CLIPS[e] for e in dp.clips], dtype=torch.float64)
    message = Message({ClientDP.norms: server.state[ClientDP.norms]})
    result = dp.back(server, aggregate(dp, [Sums().reply(f) for f in (0.3, 7.0)], message), Sums().expect(server, 0))
    unit = 2.0 ** (math.floor(math.log2(dp._split(4)[0] * math.hypot(*CLIPS.values()))) - 20)
    released = as_vector([result.sum(e) for e in dp.clips]) / unit
    assert torch.equal(released, released.round())
    share = 0.5 - (server.state[ClientDP.norms] / message[ClientDP.norms]).log() / 0.2
    bits = (share - 0.5) * 2 / 2.0**-19
    torch.testing.assert_close(bits, bits.round(), rtol=0, atol=1e-3)


def test_group_is_clipped_as_one_vector_and_keeps_its_direction() -> None:
    dp = ClientDP(1.0, 0.5, CLIPS)
    sent = dp.out(None, Message(), Sums().reply(3.0))  # type: ignore[arg-type]
    norm = math.sqrt(10 * 9)
    assert torch.allclose(sent[Sums.group]["a"], torch.full((2, 3), 3 * 2.0 / norm))
    assert torch.allclose(sent[Sums.group]["b"], torch.full((4,), -3 * 2.0 / norm))
    assert (sent[Sums.number], sent[Sums.n]) == (pytest.approx(0.5, rel=1e-6), 1.0)
    torch.testing.assert_close(sent[Sums.fixed], torch.full((2,), 4 / math.sqrt(2)))
    short = dp.out(None, Message(), Sums().reply(0.01))  # type: ignore[arg-type]
    assert torch.equal(short[Sums.vector], torch.full((5,), 0.02))
    assert Sums.extra not in sent


def test_optional_entries_are_noised_even_when_absent() -> None:
    dp = ClientDP(1.0, 0.5, CLIPS, Adaptive(sigma=2.0))
    reply, message, server = Sums().reply(0.01), Message(), on_server(Sums(), secret=1)
    del reply[Sums.vector]
    message[dp.norms] = server.state[dp.norms] = torch.tensor(list(dp.clips.values()), dtype=torch.float64)
    sent = dp.out(None, message, reply)  # type: ignore[arg-type]
    assert (Sums.vector in sent, sent[dp.within].tolist()) == (False, [0.5] * 4)
    schema = server.method.expect(server, 0)
    dp.expect(server, 0, schema)
    bits, weight = schema[dp.within.key], schema[Sums.n.key]
    assert (bits.minimum, bits.maximum, bits.value.tolist()) == (-0.5, 0.5, list(dp.clips.values()))
    assert (weight.minimum, weight.maximum, schema.keys() & ENTRIES.keys()) == (1.0, 1.0, schema.keys())
    assert (
        dp.back(server, aggregate(dp, [reply], message), server.method.expect(server, 0))[Sums.vector].abs().min() > 0
    )


def test_non_finite_reply_becomes_zeros_without_a_failure() -> None:
    sent = ClientDP(1.0, 0.5, CLIPS).out(None, Message(), Sums().reply(math.nan))  # type: ignore[arg-type]
    assert sent[Sums.n] == 1.0
    assert not as_vector([sent[e] for e in CLIPS]).any()


def test_means_divide_by_public_numbers_and_hide_the_reply_count() -> None:
    """N = 4 at rate 0.75: three replies are expected. One reply or four are divided by 3."""
    for count in (1, 4):
        method, dp = Sums(), ClientDP(0.0, 0.75, dict.fromkeys(CLIPS, 1e3))
        server = on_server(method)
        replies = aggregate(dp, [method.reply(2.0)] * count)
        got = dp.back(server, replies, server.method.expect(server, 0))
        assert torch.equal(got[Sums.group]["a"], torch.full((2, 3), 2.0 * count / 3))
        assert torch.equal(got[Sums.vector], torch.full((5,), 4.0 * count))
        assert got[Sums.number] == 6.0 * count / 3
        assert torch.equal(got[Sums.fixed], torch.full((2,), 2.0 * count / 3))
        assert (got[Sums.n], got.weight(Sums.group), got.weight(Sums.group, "a"), got.clients) == (3.0, 3.0, 3.0, [])
        assert torch.equal(got.sum(Sums.group)["b"], torch.full((4,), -2.0 * count, dtype=torch.float64))
        assert Sums.extra not in got


def test_nobody_learns_who_was_drawn() -> None:
    """No function of the method, an add-on or a filter sees the number or the names of the drawn clients."""
    seen: dict[str, list[int]] = {}

    def spy(base: Any, *hooks: str) -> Any:
        def look(one: Any, server: Server, *given: Any, name: str) -> Any:
            seen[f"{base.__name__}.{name}"] = [*server.drawn, *server.present]
            return server.state[FedAvg.model] if "model" in name else getattr(base, name)(one, server, *given)

        return type(f"Spy{base.__name__}", (base,), {name: partialmethod(look, name=name) for name in hooks})

    own, looking = spy(Sums, "send", "expect", "receive", "predictors")(), spy(Filter, "send", "after_receive")()
    added = averaging(spy(AddOn, "send", "expect", "receive", "evaluation_model")())
    for method, clip, names in (own, CLIPS, "SpyFilter, SpySums"), (added, 1.0, "SpyAddOn, SpyFilter"):
        run = play(Filtered(method, ClientDP(1.0, 1.0, clip), looking), rounds=1)
        assert run.rows[-1]["privacy"]["remarks"][1:] == [OWN_CODE.format(names)]
    assert (len(seen), any(seen.values()), run.server.drawn) == (10, False, [])


def test_noise_covers_every_tensor_even_if_no_client_is_drawn() -> None:
    """The standard deviation is sigma |(C_1, ..., C_4)| everywhere, tested over 4,000 releases."""
    dp, method = ClientDP(1.5, 0.5, CLIPS), Sums()
    found = []
    server = on_server(method, secret=3)
    for _ in range(1000):
        got = dp.back(server, Aggregator(ENTRIES).result(), server.method.expect(server, 0))
        found.append(as_vector([got.sum(e) for e in CLIPS]))
    rows = torch.stack(found)
    std = 1.5 * math.hypot(*CLIPS.values())
    assert rows.shape[1] == 6 + 4 + 5 + 1 + 2
    assert rows.std(0) == pytest.approx(torch.full((18,), std).numpy(), rel=0.12)
    assert rows.mean(0).abs().max() < 5 * std / math.sqrt(1000)
    correlations = torch.corrcoef(rows.T) - torch.eye(18)
    assert correlations.abs().max() < 0.2
    assert len(server.ledger.events) == 1000


@pytest.mark.parametrize("sent", [(), (0.3, 7.0)])
def test_noise_covers_every_tensor_and_bit_even_if_no_client_is_drawn(sent: tuple[float, ...]) -> None:
    """The standard deviation is z |(C_1, ..., C_4)| everywhere, and every clip norm follows its own bits."""
    dp, server = ClientDP(1.5, 0.5, CLIPS, Adaptive(0.4, 0.7, sigma=2.0)), on_server(Sums(), secret=3)
    norms, wanted, source = torch.tensor(list(dp.clips.values())).double(), server.method.expect(server, 0), Secret(3)
    replies = aggregate(dp, [Sums().reply(f) for f in sent], Message({dp.norms: norms}))
    got, std = dp.back(server, replies, wanted), (1.5**-2 - 4 / 4.0**2) ** -0.5 * math.hypot(*CLIPS.values())
    for entry in dp.clips:
        total = replies.sum(entry) if entry in replies else wanted[entry.key].value
        for name, value in (total if isinstance(total, dict) else {"": torch.as_tensor(total)}).items():
            noised = source.add_noise(value.double() if sent else torch.zeros_like(value).double(), std)
            found = got.sum(entry)
            assert torch.equal(found[name] if isinstance(found, dict) else found, noised)
    bits = source.add_noise(replies.get(dp.within, torch.zeros_like(norms)), 2.0)
    assert (server.state[dp.norms] / norms).log().allclose(-0.7 * (0.5 + bits / (0.5 * 4) - 0.4))
    assert len(server.ledger.events) == 1


def test_lost_and_failed_replies_add_noise_and_reveal_no_client() -> None:
    class Broken(AddOn):
        data_access = "none"

        def before_training(self, local: Any) -> None:
            if local.client.id in (0, 3):
                raise RuntimeError("lost")

        def after_training(self, local: Any, update: Tensors, reply: Message) -> None:
            if local.client.id == 4:
                reply[FedAvg.update] = {n: torch.zeros(7) for n in update}

    dp = ClientDP(0.0, 1.0, 1e6)
    run, plain = play(Filtered(averaging(Broken()), dp), rounds=1), play(averaging(Broken()), rounds=1)
    why = sorted(run.rows[0]["failed"].values())
    assert run.rows[0]["failed"].keys() == {"#1", "#2", "#3"}
    assert why[0].startswith("FedAvg.update[")
    assert [w.split(" (")[0] for w in why[1:]] == [FAILED_PRIVATELY] * 2
    start = averaging().networks.first("", 3, 5)
    for name, old in start.items():
        by_two, by_five = (r.server.state[FedAvg.model][name] - old for r in (plain, run))
        assert torch.allclose(by_five, 2 / 5 * by_two, atol=1e-6)


# The ledger.


def test_every_round_is_one_event_and_epsilon_is_their_composition(tmp_path: Path) -> None:
    run = play(Filtered(averaging(), ClientDP(1.2, 0.4, 1.0)), rounds=4, out=tmp_path)
    events = Ledger(tmp_path / "ledger.jsonl").events
    assert events == tuple(
        Event("client_dp", 1.2, 0.4, client=ALL_CLIENTS, round=t, relation=privacy.ADD_OR_REMOVE_CLIENT)
        for t in (1, 2, 3, 4)
    )
    want = [compose([(1.2, 0.4, t)], 1e-5).epsilon for t in (1, 2, 3, 4)]
    assert [row["epsilon"] for row in run.rows] == pytest.approx(want)
    assert run.rows[-1]["privacy"]["relation"] == "add or remove one client"
    assert "accuracy_clients" not in run.rows[0]


def test_events_count_noise_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event charges one draw for each tensor of the model, and one for the bits."""
    drawn: list[Any] = []
    add_noise = Secret.add_noise
    monkeypatch.setattr(Secret, "add_noise", lambda *a: (drawn.append((*a[1:], ledger.events)), add_noise(*a))[1])
    ledger = Ledger()
    play(Filtered(averaging(), ClientDP(1.0, 0.5, 1.0, Adaptive(sigma=2.0))), ledger=ledger)
    assert [len(events) for *_, events in drawn] == [t for t in (1, 2, 3) for _ in range(4 + 1)]
    assert [std for values, std, _ in drawn if values.shape == (1,)] == [2.0] * 3


def test_budget_stops_the_run_before_any_client_trains() -> None:
    worked: list[int] = []

    class Spy(AddOn):
        data_access = "none"

        def before_training(self, local: Any) -> None:
            worked.append(local.round)

    budget = compose([(1.0, 0.9, 2)], 1e-5).epsilon * 1.001
    ledger = Ledger(budget=budget)
    with pytest.raises(privacy.BudgetExhausted, match="round 3 was not finished; the state after round 2 is kept"):
        play(Filtered(averaging(Spy()), ClientDP(1.0, 0.9, 1.0)), rounds=9, ledger=ledger, secret=1)
    assert set(worked) == {1, 2}
    assert len(ledger.events) == 2


def test_seeded_run_has_no_guarantee_and_unseeded_runs_differ(tmp_path: Path) -> None:
    def once(secret: int | None, **how: Any) -> Run:
        dp = ClientDP(1.0, 0.5, 1.0, Adaptive(sigma=2.0))
        return play(Filtered(averaging(FedAvgM()), dp), secret=secret, **how)

    first = once(7)
    assert_same(first, once(7, workers=3))
    assert first.rows[-1]["epsilon"] is None
    assert "seeded" in first.rows[-1]["privacy"]["reason"]
    models = [run.server.state[FedAvg.model]["classifier.weight"] for run in (first, once(8), once(None), once(None))]
    assert len({json.dumps(m.flatten().tolist()) for m in models}) == 4


def test_draw_is_poisson() -> None:
    """In 4,000 draws of 12 clients, each is drawn with rate q and each pair with rate q^2, within 5 sigma."""
    q, count = 0.3, 4000
    dp, server = ClientDP(1.0, q, 1.0), on_server(Sums(), clients=12, secret=1)
    drawn = torch.zeros(count, 12, dtype=torch.float64)
    for row in drawn:
        row[dp.draw(server)] = 1
    together = drawn.T @ drawn / count
    want = torch.full((12, 12), q**2, dtype=torch.float64).fill_diagonal_(q)
    assert ((together - want).abs() < 5 * (want * (1 - want) / count).sqrt()).all()
    sizes = drawn.sum(1)
    assert float(sizes.var()) == pytest.approx(12 * q * (1 - q), rel=0.15)
    assert not server.ledger.events


@pytest.mark.parametrize("quantile", [0.5, 0.8])
def test_adaptive_norm_finds_the_quantile(quantile: float) -> None:
    """Two entries with norms spread evenly up to 1 and up to 10, at rate 1, with small noise on the bits."""
    count, clips = 20, {Sums.vector: 0.1, Sums.group: 100.0}
    dp, method = ClientDP(0.1, 1.0, clips, Adaptive(quantile, 0.25, sigma=1.0)), Sums()
    server = on_server(method, clients=count, secret=4)
    dp.start(server, Bare().expect(server, 0), {})  # type: ignore[arg-type]
    server.state[dp.norms] = torch.tensor([30.0, 0.1], dtype=torch.float64)
    replies = []
    for k in range(count):
        one = torch.zeros(5)
        one[0] = (k + 0.5) / count
        replies.append(Message({Sums.n: 1.0, Sums.vector: one, Sums.group: {"a": 10 * one[:1]}}))
    found = []
    for _ in range(100):
        message = Message()
        dp.send(server, 0, message)
        dp.back(server, aggregate(dp, replies, message), server.method.expect(server, 0))
        found.append(server.state[dp.norms])
    by_key = dict(zip((e.key for e in dp.clips), torch.stack(found[-60:]).mean(0).tolist()))
    assert by_key == {
        "Sums.vector": pytest.approx(quantile, rel=0.06),
        "Sums.group": pytest.approx(10 * quantile, rel=0.06),
    }


class Bare(Sums):
    """Method with only the two entries of the test above."""

    def expect(self, server: Server, client: int) -> Schema:
        return {k: v for k, v in super().expect(server, client).items() if k in ("Sums.n", "Sums.group", "Sums.vector")}


# Adaptive clipping.


def test_adaptive_norms_stay_in_the_range_of_clips() -> None:
    dp, method = ClientDP(0.1, 1.0, CLIPS, Adaptive(0.5, 1e3, sigma=1.0)), Sums()
    for bit, limit in ((0.5, 1e-12), (-0.5, 1e30)):
        server = on_server(method)
        replies = AggregatedReplies(Message({dp.within: torch.full((4,), 400 * bit, dtype=torch.float64)}), {}, {}, [])
        dp.back(server, replies, method.expect(server, 0))
        assert server.state[dp.norms].tolist() == [limit] * 4


def test_bits_and_updates_together_cost_sigma() -> None:
    """1/z^2 = 1/z_delta^2 + (number of bits) / (2 sigma_b)^2; the default sigma_b is a twentieth of q N."""
    for clips, bits in ((1.0, 1), (BOTH, 2)):
        z, b = ClientDP(1.3, 0.5, clips, Adaptive(sigma=3.0))._split(8)
        assert (b, z**-2 + bits * (2 * b) ** -2) == (3.0, pytest.approx(1.3**-2))
    assert ClientDP(1.3, 0.5, 1.0, Adaptive())._split(800)[1] == 20.0
    assert ClientDP(0.0, 0.5, 1.0, Adaptive())._split(8) == (0.0, 0.0)


# Refusals.


class Normed(Tiny):
    def __init__(self, outputs: int) -> None:
        super().__init__(outputs, norm=True)


BUILT: list[tuple[Any, Any, str]] = [
    (lambda: FedAvg(factory=Tiny), 1.0, "the number of a client.s images is private: give weights='uniform'"),
    (lambda: averaging(SCAFFOLD()), 1.0, r"SCAFFOLD\.drift has no clip: give clip="),
    (lambda: averaging(FedNova()), 1.0, r"FedNova\.tau has no clip"),
    (lambda: averaging(FedExP()), 1.0, r"FedExP\.norm has no clip"),
    (lambda: averaging(FedDF(steps=1)), {FedAvg.update: 1.0, FedDF.logits: 1.0}, "FedDF reads single replies"),
    (lambda: averaging(FedGen()), 1.0, "FedGen reads single replies on the server"),
    (lambda: averaging(Anchors(init="statistics")), 1.0, "Anchors queries every client before round 1"),
    (lambda: averaging(factory={"a": Tiny, "b": Tiny}, assign={}), 1.0, "several architectures"),
    (lambda: FedDM(factory=Tiny), {FedDM.samples: 1.0}, r"FedDM\.samples cannot be noised: its rule is 'union'"),
    (lambda: FedDM(factory=Tiny), 1.0, r"clip names FedAvg\.update, which FedDM does not have"),
    (averaging, {FedAvg.model: 1.0}, r"FedAvg\.model cannot be noised: its rule is 'first'"),
    (averaging, {FedAvg.counters: 1.0}, r"FedAvg\.counters cannot be noised: its rule is 'max'"),
    (averaging, {FedAvg.update: 1.0, FedAvg.samples: 1.0}, r"FedAvg\.samples cannot be clipped: it is the weight"),
]


@pytest.mark.parametrize(("make", "clip", "why"), BUILT, ids=[why[:24] for *_, why in BUILT])
def test_methods_that_no_clip_bounds_are_refused_when_built(make: Any, clip: Any, why: str) -> None:
    refused(lambda: Filtered(make(), ClientDP(1.0, 0.5, clip)), PrivacyError, why)


def test_methods_with_unbounded_entries_are_refused_when_built() -> None:
    class Noisy(AddOn):
        private = True

    class Largest(AddOn):
        top = Entry[Tensor]("max")

    class Rows(Sums):
        rows = Entry[Tensor]("union")

    class Digests(Sums):
        def read_reply(self, server: Server, reply: Message) -> Message:
            return Message()

    refused: list[tuple[Method, Any, str]] = [
        (averaging(Noisy()), 1.0, "FedAvg protects single records already; one ledger cannot cover"),
        (averaging(Largest()), 1.0, r"Largest\.top is a maximum"),
        (Rows(), CLIPS, r"Rows\.rows keeps each client's rows separate"),
        (Digests(), CLIPS, "Digests reads single replies on the server"),
    ]
    for method, clip, why in refused:
        with pytest.raises(PrivacyError, match=why):
            Filtered(method, ClientDP(1.0, 0.5, clip))


def test_replies_that_no_clip_bounds_are_refused_before_round_1() -> None:
    class Free(Sums):
        def expect(self, server: Server, client: int) -> Schema:
            return {**super().expect(server, client), self.vector.key: EntrySpec(torch.zeros(5), max_rows=9)}

    class Silent(Sums):
        def expect(self, server: Server, client: int) -> Schema:
            return {}

    class Whole(Sums):
        def expect(self, server: Server, client: int) -> Schema:
            return {**super().expect(server, client), self.vector.key: EntrySpec(torch.zeros(5, dtype=torch.int64))}

    class Half(Sums):
        def expect(self, server: Server, client: int) -> Schema:
            return {
                **super().expect(server, client),
                self.group.key: EntrySpec({"a": torch.zeros(5, dtype=torch.float16)}),
            }

    less = {e: c for e, c in CLIPS.items() if e is not Sums.number}
    protos = {FedProto.means: 1.0}
    refused: list[tuple[Method, Any, str]] = [
        (averaging(factory=Normed), 1.0, r"FedAvg\.buffers, batch-norm statistics, .*buffers='drop'.*norm='instance'"),
        (averaging(factory=Normed, buffers="local"), 1.0, r"FedAvg\.counters, batch-norm statistics"),
        (Sums(), less, r"replies hold Sums\.number, which has no clip"),
        (Free(), CLIPS, r"Sums\.vector must be float32 or float64, and have a fixed shape"),
        (Whole(), CLIPS, r"Sums\.vector must be float32 or float64, and have a fixed shape"),
        (Half(), CLIPS, r"Sums\.group must be float32 or float64, and have a fixed shape"),
        (Silent(), CLIPS, r"`expect` must describe Sums\.fixed"),
        (FedProto(factory=Tiny), protos, r"FedProto\.count holds a weight for each row of FedProto\.means"),
    ]
    for method, clip, why in refused:
        with pytest.raises(PrivacyError, match=why):
            play(Filtered(method, ClientDP(1.0, 0.5, clip)))
    with pytest.raises(NotAccountable, match="one over the number of clients, 1/5"):
        play(Filtered(averaging(), ClientDP(1.0, 0.5, 1.0)), ledger=Ledger(delta=0.2))
    with pytest.raises(PrivacyError, match="needs a server with a ledger"):
        ClientDP(1.0, 0.5, 1.0).draw(SimpleNamespace(ledger=None))  # type: ignore[arg-type]


def test_invalid_options_are_refused() -> None:
    bad: list[tuple[Any, Any, str]] = [
        ((1.0, 0.5, 0.0), None, r"the clip of FedAvg\.update must be in \[1e-12, 1e\+30\]"),
        ((1.0, 0.5, {}), None, "clip must hold at least one entry"),
        ((1.0, 0.5, 1.0), {"sigma": 0.5}, r"Adaptive\(sigma=...\) must be above 0\.5, because sigma is 1; got 0\.5: "),
        (
            (2.0, 0.5, BOTH),
            {"sigma": 1.4},
            r"Adaptive\(sigma=...\) must be above 1\.41421, because sigma is 2; got 1\.4: ",
        ),
    ]
    for options, adaptive, why in bad:
        with pytest.raises(ValueError, match=why):
            ClientDP(*options, adaptive=None if adaptive is None else Adaptive(**adaptive))
    with pytest.raises(ValueError, match=r"must be above 0\.5, because sigma is 1; got 0\.125"):
        play(Filtered(averaging(), ClientDP(1.0, 0.5, 1.0, Adaptive())))
    with pytest.raises(ValueError, match="the method draws its clients itself"):
        play(Filtered(averaging(), ClientDP(1.0, 0.5, 1.0)), participation=0.5)


def test_client_state_and_post_processing_stay_allowed() -> None:
    def nobody() -> LabeledImages:
        return federation()[0][torch.zeros(0, dtype=torch.int64)]

    clients = [*federation(), nobody()]
    for method in (
        averaging(factory=Normed, buffers="drop"),
        averaging(personal="classifier.*"),
        averaging(MOON(), FedAdam(), steps=2),
        averaging(Anchors(ipc=1, selected=(1,), steps=1)),
        averaging(Condensed(ipc=1, steps=1)),
    ):
        run = play(Filtered(method, ClientDP(1.0, 1.0, 1.0)), rounds=2, clients=clients)
        assert (run.rows[-1]["failed"], run.rows[-1]["empty"]) == ({}, [])
        assert run.rows[-1]["up"]["FedAvg.samples"] == 6 * 8
    held = [ClientData(c, c) for c in federation()]
    for method in (averaging(FineTune()), averaging(personal="classifier.*")):
        tested = play(Filtered(method, ClientDP(1.0, 1.0, 1.0)), clients=held, evaluate="all").rows[-1]
        assert tested["accuracy_personal"]["clients"] == len(held)
        assert "personal model" in tested["privacy"]["reason"]
    exp = ClientDP(1.0, 0.5, {FedAvg.update: 1.0, FedExP.norm: 1.0})
    assert play(Filtered(averaging(FedExP()), exp), rounds=2).rows[-1]["extrapolation"] >= 1


def test_order_of_the_clips_changes_nothing() -> None:
    turned = dict(reversed(BOTH.items()))
    one, other = (Filtered(averaging(SCAFFOLD()), ClientDP(1.0, 0.8, clip)) for clip in (BOTH, turned))
    assert repr(one) == repr(other)
    assert_same(play(one, secret=1), play(other, secret=1))
