"""One finite but useless reply neither ends a run nor changes it: it counts as lost, and its client is named."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fl
from fl._codec import digest
from fl.addons import SCAFFOLD, FedExP, FedNova, FedProx
from fl.engine import _outliers
from fl.engine._commit_guard import check_state
from fl.methods import FedDM, FedProto
from fl.participants import Client
from tests.fl.federations import Tiny, federation, images
from tests.fl.secure_protocol import InMemoryKeyring

TINY = partial(Tiny, norm=True)


def scaled(value: Any, to: float) -> Any:
    if isinstance(value, Tensor):
        return torch.full_like(value, to) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: scaled(part, to) for name, part in value.items()}
    return value.replace(images=scaled(value.images, to))


def multiplied(value: Any, factor: float) -> Any:
    return {n: t * factor for n, t in value.items()} if isinstance(value, dict) else value * factor


def hostile(kind: type, entry: fl.Entry[Any], to: float | None, factor: float | None = None) -> type:
    """Return a subclass whose client 1 fills `entry` with `to` in round 3, or multiplies it by `factor`.

    Its reply is lost if both are None.
    """

    class Hostile(kind):  # type: ignore[misc]
        def local(self, client: Client, message: fl.Message) -> fl.Message:
            reply = super().local(client, message)
            if client.id == 1 and client.round == 3:
                if to is None and factor is None:
                    raise RuntimeError("lost")
                reply[entry] = scaled(reply[entry], to) if factor is None else multiplied(reply[entry], factor)
            return reply

    Hostile.__name__ = kind.__name__
    return Hostile


def run(kind: type, entry: fl.Entry[Any], to: float | None, *addons: Any, rounds: int = 10, **options: Any) -> fl.Run:
    method = hostile(kind, entry, to)(*addons, **options)
    return fl.simulate(method, federation(), rounds=rounds, seed=3, test=images(30, 99), progress=False)


AVERAGING = {"factory": TINY, "lr": 0.1, "batch": 8}
DISTILLING = {"factory": Tiny, "ipc": 1, "steps": 2, "server_epochs": 2}
CASES = {
    "weights": (fl.FedAvg, fl.FedAvg.update, 1e20, [], AVERAGING),
    "weights without norm": (fl.FedAvg, fl.FedAvg.update, 1e20, [], AVERAGING | {"factory": Tiny}),
    "weights with a proximal term": (fl.FedAvg, fl.FedAvg.update, -1e20, [FedProx(0.1)], AVERAGING),
    "weights for FedNova": (fl.FedAvg, fl.FedAvg.update, 1e20, [FedNova()], AVERAGING),
    "norm for FedExP": (fl.FedAvg, FedExP.norm, 1e20, [FedExP()], AVERAGING),
    "running means": (fl.FedAvg, fl.FedAvg.buffers, 3e38, [], AVERAGING),
    "negative variances": (fl.FedAvg, fl.FedAvg.buffers, -1.0, [], AVERAGING),
    "control variates": (fl.FedAvg, SCAFFOLD.drift, 3e38, [SCAFFOLD()], AVERAGING),
    "pixels": (FedDM, FedDM.images, 3e38, [], DISTILLING),
    "small pixels": (FedDM, FedDM.images, -1e6, [], DISTILLING),
    "prototypes": (FedProto, FedProto.means, 3e38, [], {"factory": Tiny, "lr": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_diverged_reply_counts_as_lost(case: str) -> None:
    kind, entry, to, addons, options = CASES[case]
    hurt = run(kind, entry, to, *addons, **options)
    lost = run(kind, entry, None, *addons, **options)
    assert len(hurt.rows) == 10
    assert list(hurt.rows[2]["failed"]) == ["1"]
    assert all(not row["failed"] and "discarded" not in row for row in hurt.rows[:2] + hurt.rows[3:])
    for (key, one), (_, other) in zip(hurt.server.state.items(), lost.server.state.items(), strict=True):
        if isinstance(one, dict):
            assert all(torch.equal(one[n], other[n]) for n in one), key
    assert [r["accuracy"] for r in hurt.rows] == [r["accuracy"] for r in lost.rows]


SIZES = [1e2, 1e3, 1e4, 1e5, 1e6, 1e8, 1e12, 1e30]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_size_of_a_reply_ends_a_run(case: str) -> None:
    """A reply may be small enough to be accepted: the state after its round must still be one to continue from."""
    kind, entry, _, addons, options = CASES[case]
    for to in (*SIZES, *(-size for size in SIZES[::3])):
        assert len(run(kind, entry, to, *addons, rounds=4, **options).rows) == 4, to


@pytest.mark.parametrize("name", ["update", "buffers", "means"])
@pytest.mark.parametrize(("factor", "refused"), [(99.0, False), (101.0, True)])
@pytest.mark.filterwarnings("ignore:round 3. the reply of client 1 makes up")
def test_reply_is_refused_above_a_hundred_times_the_median(name: str, factor: float, refused: bool) -> None:
    kind, entry = (FedProto, FedProto.means) if name == "means" else (fl.FedAvg, getattr(fl.FedAvg, name))
    options = CASES["prototypes"][4] if name == "means" else {**AVERAGING, "batch": 12}
    method = hostile(kind, entry, None, factor)(**options)
    rows = fl.simulate(method, [images(12, 7)] * 5, rounds=4, seed=3, progress=False).rows
    why = f"{entry.key} is {factor:.3g} times as large as the median of 5 replies, at most 100 times is allowed"
    assert rows[2]["failed"] == ({"1": why} if refused else {})
    assert list(rows[2].get("dominant", {})) == ([] if refused else ["1"])
    assert not any(row["failed"] or "dominant" in row for row in rows[:2] + rows[3:])


def test_each_entry_is_compared_among_the_replies_that_have_it() -> None:
    own = {"a": (1.0, 100.0, 1.0)}
    found = {k: {**own, "c": (9.0 if k == 6 else 1.0, 2.0, 1.0)} for k in (0, 6, 7)}  # three replies with c
    found |= {k: {**own, "b": (1.0, 100.0, 1.0)} for k in range(1, 5)} | {5: {"b": (150.0, 100.0, 2.0)}}
    why = "b is 150 times as large as the median of 5 replies, at most 100 times is allowed"
    assert _outliers.too_large(found) == {5: why}
    assert _outliers.dominant(found) == {5: "99% of b"}
    for replies, share in ((4, 1 / 2), (5, 2 / 5), (6, 1 / 3), (12, 1 / 3)):
        for factor, shown in ((0.99, {}), (1.01, {0: f"{share * 1.01:.0%} of a"})):
            found = {k: {"a": ((1 - factor * share) / (replies - 1), 9.0, 1.0)} for k in range(1, replies)}
            assert _outliers.dominant(found | {0: {"a": (factor * share / 2, 9.0, 2.0)}}) == shown
    for size, refused in ((14.9, []), (15.1, [3])):  # five times the median 3, which lies between 2 and 4
        sizes = enumerate((1.0, 2.0, 4.0, size))
        assert (
            list(_outliers.too_large({k: {"a": (one, 5.0, 1.0), "z": (one, 5.0, 1.0)} for k, one in sizes})) == refused
        )


def test_compared_values_are_root_mean_squares_and_mean_weights() -> None:
    class E:
        rows, plain = fl.Entry[Tensor]("first"), fl.Entry[dict[str, Tensor]]("sum")
        value, top = fl.Entry[Tensor]("mean", by=rows), fl.Entry[Tensor]("max")

    reply = fl.Message({E.rows: torch.tensor([1.0, 3.0]), E.value: torch.tensor([3.0, 4.0]), E.top: 2 * torch.ones(9)})
    reply[E.plain] = {"a": torch.ones(3), "b": -torch.ones(5, 2)}
    schema = {key: fl.EntrySpec(value, max_ratio=7 if key == "E.top" else None) for key, value in reply.items()}
    found = _outliers.compared(reply, {entry.key: entry for entry in (E.rows, E.plain, E.value, E.top)}, schema)
    wanted = {"E.rows": (5**0.5, 100, 0), "E.value": (12.5**0.5, 100, 2), "E.top": (2, 7, 0), "E.plain": (1, 100, 1)}
    assert found == {key: pytest.approx(value) for key, value in wanted.items()}


def test_replies_are_compared_from_four_on_and_below_a_stated_bound_alone() -> None:
    """Three replies, secure sums, private runs, and a bound on the norm that the user gave: no comparison."""
    factory, far = Tiny, hostile(fl.FedAvg, fl.FedAvg.update, None, 500.0)

    def failed(method: fl.Method, count: int) -> dict[str, str]:
        how: Any = {"rounds": 3, "seed": 3, "progress": False, "secret": 1 if method.private else None}
        row = fl.simulate(method, [images(12, 7)] * count, **how).rows[2]
        assert method.private or method.sealed or count < 4 or "dominant" in row or row["failed"]
        return row["failed"]

    assert failed(far(factory=factory, lr=0.1), 3) == {}
    assert list(failed(far(factory=factory, lr=0.1), 4)) == ["1"]
    with pytest.warns(UserWarning, match=r"round 3: the reply of client 1 makes up 9\d% of FedAvg.update"):
        assert failed(far(factory=factory, lr=0.1, max_update_norm=1e3), 4) == {}
    ring = InMemoryKeyring()
    sums = fl.SecureSums(ring.registry(4), threshold=3, keyring=ring, bounds={fl.FedAvg.update: 1e3})
    assert failed(fl.Filtered(far(factory=factory, lr=0.1, max_samples=12), sums), 4) == {}
    noisy = fl.ClientDP(sigma=0.0, rate=1.0, clip=1e6)
    assert failed(fl.Filtered(far(factory=factory, lr=0.1, weights="uniform"), noisy), 4) == {}


@pytest.mark.parametrize("addon", [None, FedNova(), FedExP(), SCAFFOLD()], ids=str)
def test_client_with_most_of_the_images_is_named_but_not_refused(addon: Any) -> None:
    clients = [images(1, seed) for seed in range(5)] + [images(120, 9)]
    method = fl.FedAvg(*[addon] if addon else [], factory=Tiny, lr=0.1, batch=1)
    with pytest.warns(UserWarning, match=r"the reply of client 5 makes up \d+% of"):
        rows = fl.simulate(method, clients, rounds=2, progress=False).rows
    assert not any(row["failed"] for row in rows)


@pytest.mark.parametrize("samples", [1e6, 12.0])
def test_claimed_sample_count_that_dominates_is_named(samples: float) -> None:
    class Liar(fl.AddOn):
        def after_training(self, local: Any, update: Any, reply: fl.Message) -> None:
            if local.client.id in (0, 3):
                reply[fl.FedAvg.samples] = samples

    method = fl.FedAvg(Liar(), factory=Tiny, lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows = fl.simulate(method, [images(12, seed) for seed in range(10)], rounds=2, progress=False).rows
    assert [list(row.get("dominant", {})) for row in rows] == ([["0", "3"]] * 2 if samples > 12 else [[], []])
    assert sum("makes up" in str(one.message) for one in said) == (2 if samples > 12 else 0)


@pytest.mark.parametrize("case", ["weights", "pixels"])
def test_replies_that_wait_in_a_file_give_the_same_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _, _, addons, options = CASES[case]

    clients = [data.replace(class_names=("a", "b", "c")) for data in federation()]

    def played() -> tuple[Any, ...]:
        run = fl.simulate(kind(*addons, **options), clients, rounds=2, seed=3, progress=False)
        names = [getattr(value, "class_names", None) for _, value in run.server.state.items()]
        bytes_by_client = [row["bytes_by_client"] for row in run.rows]
        return bytes_by_client, names, [digest(key, value) for key, value in run.server.state.items()]

    usual = played()
    monkeypatch.setattr(_outliers, "_IN_MEMORY", 700)
    assert played() == usual


@pytest.mark.parametrize("raises", [False, True], ids=["unusable", "raises"])
def test_failed_round_leaves_the_state_before_it(raises: bool) -> None:
    servers, rows = list[Any](), list[dict[str, Any]]()

    class Breaks(fl.FedAvg):
        def receive(self, server: Any, replies: Any) -> None:
            super().receive(server, replies)
            if server.round == 2:
                servers.append(server)
                server.state[fl.FedAvg.model] = scaled(server.state[fl.FedAvg.model], float("nan"))
                if raises:
                    raise RuntimeError("broken")

    why = "the new state's FedAvg.model[body.0.weight] holds NaN or Inf"
    said = f"round 2: {why}; the state after round 1 is kept, and the run goes on"
    options: dict[str, Any] = {"seed": 3, "progress": False}
    failed: Any = pytest.raises(RuntimeError, match="broken")
    with failed if raises else pytest.warns(UserWarning, match=re.escape(said)):
        fl.simulate(Breaks(**AVERAGING), federation(), rounds=2, on_round=rows.append, **options)
    kept = fl.simulate(fl.FedAvg(**AVERAGING), federation(), rounds=1, **options).server.state
    assert {k: digest(k, v) for k, v in servers[0].state.items()} == {k: digest(k, v) for k, v in kept.items()}
    assert [row.get("discarded") for row in rows] == ([None] if raises else [None, why])


def test_state_that_is_not_finite_is_discarded() -> None:
    class Wider(fl.AddOn):
        extra_outputs = 2

    method = fl.FedAvg(Wider(), factory=Tiny, lr=0.1)
    server = fl.simulate(method, federation(), rounds=1, progress=False).server
    assert check_state(method, server) is None
    model, said = server.state[fl.FedAvg.model], "the new model gives NaN or Inf on noise images"
    beyond = torch.cat([model["classifier.weight"][:3], torch.full((2, 48), 3e38)])  # only the outputs of the add-on
    for changes, words in (
        (scaled(model, float("inf")), "holds NaN or Inf"), (multiplied(model, 1e30), said),
        ({"classifier.weight": beyond}, said),
    ):  # fmt: skip
        state = server.state.copy()
        state[fl.FedAvg.model] = {**model, **changes}
        assert words in str(check_state(method, replace(server, state=state)))

    class Named(fl.FedAvg):
        def predictors(self, server: fl.Server) -> dict[str, fl.Predictor]:
            return {"b": super().predictors(server)[""]}

    named = Named(Wider(), factory=Tiny, lr=0.1)
    assert check_state(named, replace(server, state=state)) == said.replace("model", "model 'b'")
