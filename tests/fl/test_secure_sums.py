"""Secure sums around methods: results equal to plain sums, dropouts, refusals, and the content of transcripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from re import escape
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fl
from attacks import transcript
from distillkit.privacy import Ledger, PrivacyError
from fl import Client, ClientDP, Entry, FedAvg, Filtered, Keyring, Message, Method, NoUsableReply, Run, SecureSums
from fl.addons import MOON, SCAFFOLD, Anchors, FedCOG, SharedImage
from fl.aggregation import AggregatedReplies, Aggregator, EntrySpec, Schema, check_reply
from fl.methods import SummedFedDM
from fl.schema import MAX_WEIGHT
from fl.secure._encoding import BoundExceeded, ReplyLayout
from fl.secure.sums import require_sums
from tests.fl.federations import Tiny, federation, images, small
from tests.fl.invariances import assert_same
from tests.fl.secure_protocol import InMemoryKeyring, correlation
from tests.fl.test_addon_combinations import PICTURE, SHARED
from tests.refused import refused

FEW = settings(max_examples=25, deadline=None)
FAST: dict[str, Any] = {"factory": Tiny, "lr": 0.05, "batch": 8, "max_samples": 100}


@pytest.fixture
def ring() -> InMemoryKeyring:
    return InMemoryKeyring()


def sealed(method: Method, ring: Keyring, kind: type[SecureSums] = SecureSums, **options: Any) -> Filtered:
    bounds = options.pop("bounds", {})
    bounds = {FedAvg.update: 8.0, **bounds} if isinstance(method, FedAvg) else bounds
    return Filtered(method, kind(ring.registry(4), bounds=bounds, **{"threshold": 3, "keyring": ring, **options}))


def client_data() -> list[fl.ClientData]:
    return [fl.ClientData(data, images(6, seed=20 + k)) for k, data in enumerate(federation()[:4])]


def play(method: Method, **how: Any) -> Run:
    return fl.simulate(method, client_data(), test=images(30, 99), progress=False, **{"rounds": 2, **how})


def max_difference(one: Run, other: Run) -> float:
    """Return the largest difference of a weight."""
    first, second = (dict(r.models[""].state_dict()) for r in (one, other))
    return max(float((first[n] - second[n]).abs().max()) for n in first)


# The whole numbers.


class Every:
    key = "Every"
    weight = Entry[float]("sum")
    rows = Entry[torch.Tensor]("sum")
    plain = Entry[dict[str, torch.Tensor]]("mean")
    weighted = Entry[dict[str, torch.Tensor]]("mean", by=weight)
    by_rows = Entry[torch.Tensor]("mean", by=rows)
    over = Entry[torch.Tensor]("mean")
    total = Entry[torch.Tensor]("sum")
    count = Entry[torch.Tensor]("sum")


ENTRIES = {e.key: e for e in vars(Every).values() if isinstance(e, Entry)}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MAXIMA = {"Every.weight": 50.0, "Every.rows": 20.0, "Every.count": 100.0}
POWERS = {**MAXIMA, "Every.weight": 64.0, "Every.rows": 32.0}  # with which weights are summed exactly


@pytest.mark.parametrize("maxima", [MAXIMA, POWERS], ids=["any", "powers of two"])
@given(st.integers(0, 2**30), st.sampled_from(FLOATS), st.sampled_from(WHOLE), st.integers(1, 4), st.integers(8, 52))
@FEW
def test_decoded_sum_is_within_half_a_unit_per_client(
    maxima: dict[str, float], seed: int, dtype: torch.dtype, whole: torch.dtype, clients: int, bits: int
) -> None:
    g = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return (6 * torch.rand(shape, generator=g, dtype=torch.float64) - 3).to(dtype)

    def reply() -> Message:
        return Message(
            {
                Every.weight: float(torch.randint(0, 51, (), generator=g)),
                Every.rows: torch.randint(0, 21, (3,), generator=g).double(),
                Every.plain: {"b": values(2, 3), "a": values()},
                Every.weighted: {"x": values(4)},
                Every.by_rows: values(3, 2),
                Every.over: values(5),
                Every.total: values(0),
                Every.count: torch.randint(0, 101, (2, 2), generator=g).to(whole),
            }
        )

    replies = [reply() for _ in range(clients)]
    schema: Schema = {key: EntrySpec(value) for key, value in replies[0].items()}
    layout = ReplyLayout.from_schema(schema, ENTRIES, {**dict.fromkeys(ENTRIES, 3.0), **maxima}, bits, 6)
    assert ReplyLayout.from_json(layout.to_json()) == layout
    assert layout.matches(schema)
    reducer = Aggregator(ENTRIES)
    for k, one in enumerate(replies):
        reducer.fold(k, check_reply(one, ENTRIES, schema))
    want = reducer.result()
    vectors = [layout.encode(one) for one in replies]
    assert all(len(v) == layout.length and v.dtype == torch.int64 for v in vectors)
    got = layout.decode(torch.stack(vectors).sum(0), list(range(clients)), schema)
    assert got.clients == want.clients
    for line in layout.entries:
        entry = ENTRIES[line.key]
        off = clients * layout.unit(line) / 2
        for name, theirs, ours in each(want.sum(entry), got.sum(entry)):
            if theirs.numel():
                assert float((theirs.double() - ours.double()).abs().max()) <= off * (1 + 1e-9) + 1e-12, name
            weights = [torch.as_tensor(replies.weight(entry, name)).double() for replies in (want, got)]
            assert torch.equal(*weights) or maxima is not POWERS
        for _, theirs, ours in each(want[entry], got[entry]):
            assert theirs.dtype == ours.dtype
            assert theirs.shape == ours.shape
            if maxima is POWERS:
                torch.testing.assert_close(ours, theirs, rtol=0.02, atol=off)
        if line.is_integer:
            assert torch.equal(want[entry], got[entry])


def each(one: Any, other: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert set(one) == set(other)
        yield from ((n, one[n], other[n]) for n in one)
    else:
        yield "", torch.as_tensor(one), torch.as_tensor(other)


def test_possible_overflow_is_refused_when_built() -> None:
    crowd = fl.Registry({k: k.to_bytes(32, "big").hex() for k in range(2048)})
    with pytest.raises(ValueError, match="bits=52 is too large: a sum over 2048 clients could overflow 64 bits"):
        SecureSums(crowd, threshold=1500, bits=52)
    SecureSums(crowd, threshold=1500, bits=51)
    for order in ([*ENTRIES.values()], [*ENTRIES.values()][::-1]):
        secure = SecureSums(crowd, threshold=2, bounds=dict.fromkeys(order, 1.0))
        assert list(secure.maxima) == sorted(ENTRIES)
    invalid: tuple[tuple[dict[str, Any], str], ...] = (
        ({"threshold": 1}, "threshold must be at least 2"), ({"threshold": 2049}, "threshold must be at most 2048"),
        ({"bits": 53}, "bits must be at most 52"),
        ({"bounds": {Every.over: 0.0}}, "bound of Every.over must be greater than 0"),
        ({"bounds": {Every.over: 1.0, "a": 2.0}}, "entries, such as FedAvg.update, to their maxima; got {"),
        ({"registry": {}}, "registry must be a Registry of public keys; got dict$"),
        ({"keyring": "x"}, r"keyring must be a Keyring\(folder\) or None; got str$"),
    )  # fmt: skip
    for options, said in invalid:
        refused(partial(SecureSums, **{"registry": crowd, "threshold": 2, **options}), (TypeError, ValueError), said)
    schema: Schema = {Every.count.key: EntrySpec(torch.zeros(2, dtype=torch.int64))}
    ReplyLayout.from_schema(schema, ENTRIES, {Every.count.key: 2.0**60}, 40, 7)
    with pytest.raises(ValueError, match="the sum of Every.count over 8 clients could overflow 64 bits: give it a"):
        ReplyLayout.from_schema(schema, ENTRIES, {Every.count.key: 2.0**60}, 40, 8)


@pytest.mark.parametrize("given", [True, False], ids=["bounds", "limits"])
def test_largest_values_do_not_overflow(given: bool) -> None:
    """The maxima are given as bounds, or are those of the schema."""
    limits: dict[str, float] = {} if given else {"minimum": -3.0, "maximum": 2.0}
    schema: Schema = {Every.total.key: EntrySpec(torch.zeros(2, dtype=torch.float64), **limits)}
    layout = ReplyLayout.from_schema(schema, ENTRIES, {Every.total.key: 3.0} if given else {}, 52, 2047)
    vector = layout.encode(Message({Every.total: torch.tensor([3.0, -3.0], dtype=torch.float64)}))
    total = layout.decode(2047 * vector, list(range(2047)), schema)[Every.total]
    assert total.tolist() == [3.0 * 2047, -3.0 * 2047]
    weight = EntrySpec(1.0) if given else EntrySpec(1.0, minimum=0.0, maximum=50.0)
    schema = {Every.weighted.key: EntrySpec({"x": torch.zeros(1)}), Every.weight.key: weight}
    bounds = {Every.weighted.key: 3.0, **({Every.weight.key: 50.0} if given else {})}
    layout = ReplyLayout.from_schema(schema, ENTRIES, bounds, 52, 2047)
    vector = layout.encode(Message({Every.weighted: {"x": torch.tensor([3.0])}, Every.weight: 50.0}))
    assert vector.abs().tolist() == [2**52] * 2
    decoded = layout.decode(2047 * vector, list(range(2047)), schema)
    assert decoded.sum(Every.weighted)["x"].tolist() == [2047 * 150.0]
    assert decoded[Every.weighted]["x"].tolist() == [3.0]


# The plain result.


def feddm(**options: Any) -> Method:
    return SummedFedDM(**{
        "sigma": 1.0, "sigma_sizes": 1.0, "factory": small, "ipc": 1, "steps": 2, "server_epochs": 1, "server_batch": 4,
        "num_networks": 2, "noise": "shares", "public_statistics": True, **options,
    })  # fmt: skip


METHODS: dict[str, Any] = {
    "SCAFFOLD": (lambda: FedAvg(SCAFFOLD(), **FAST), {SCAFFOLD.drift: 40.0}),
    "SummedFedDM": (feddm, {SummedFedDM.sums: 1e4, SummedFedDM.total: 1e4}),
}


@pytest.mark.parametrize("name", METHODS)
def test_results_equal_plain_sums(name: str, ring: InMemoryKeyring) -> None:
    """Weights agree within float32's rounding, and accuracies of all rounds are equal."""
    make, bounds = METHODS[name]
    how: dict[str, Any] = {"rounds": 4, "evaluate": "none"} | ({"secret": 7} if name == "SummedFedDM" else {})
    plain, secure = play(make(), **how), play(sealed(make(), ring, bounds=bounds), **how)
    assert [row["accuracy"] for row in plain.rows] == [row["accuracy"] for row in secure.rows]
    assert max_difference(plain, secure) < 2e-5
    assert secure.rows[-1]["secure_sum"] == {"clients": 4, "recovered": 0}
    assert secure.rows[-1]["epsilon"] == plain.rows[-1]["epsilon"]
    kept = [{key for key, _ in run.server.state.items()} for run in (plain, secure)]
    assert kept[1] == kept[0] | {"SecureSums.layout"}


@pytest.mark.parametrize(
    ("options", "entry", "bits"),
    [({"sigma_sizes": 8.0}, "sums", 18), ({"sigma": 8.0}, "total", 18), ({"clip": 1e-4}, "sums", 31)],
)
def test_rounding_never_removes_the_shares_of_the_noise(
    options: dict[str, Any], entry: str, bits: int, ring: InMemoryKeyring
) -> None:
    """The unit 1e4 / 2^bits is at most 1/16 of a client's share, sigma x clip / 2 of four clients; else no charge."""
    bounds, how = {SummedFedDM.sums: 1e4, SummedFedDM.total: 1e4}, {"rounds": 1, "evaluate": "none"}
    ledger, options = Ledger(), {"least": 0.0, **options}
    for low in (3, bits):
        with pytest.raises(PrivacyError, match=f"SummedFedDM.{entry}.* bits={bits + 1}," if low > 3 else "bits=3"):
            play(sealed(feddm(**options), ring, bounds=bounds, bits=low), ledger=ledger, **how)
    assert ledger.events == ()
    play(sealed(feddm(**options), ring, bounds=bounds, bits=bits + 1), ledger=ledger, **how)
    play(sealed(feddm(**{**options, "noise": "full"}), ring, bounds=bounds, bits=3), ledger=ledger, **how)


def test_rounds_with_fewer_entries_are_summed(ring: InMemoryKeyring) -> None:
    shared = SharedImage(PICTURE, **{**SHARED, "warm_rounds": 1, "rate": 0.0})
    how: dict[str, Any] = {"rounds": 2, "evaluate": "none"}
    method = FedAvg(shared, **FAST)
    plain, secure = play(method, **how), play(sealed(method, ring, bounds={SharedImage.logits: 1e3}), **how)
    assert max_difference(plain, secure) < 1e-5
    assert ["FedAvg.update" in row["up"] for row in plain.rows] == [True, False]
    assert secure.rows[0]["up"]["SecureSums.masked"] > secure.rows[1]["up"]["SecureSums.masked"]


def test_masks_differ_and_results_are_bitwise_equal(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "ring")
    method, seen, runs = sealed(FedAvg(SCAFFOLD(), **FAST), ring, bounds={SCAFFOLD.drift: 40.0}), [], []
    for i in range(2):
        runs.append(play(method, out=fl.RunFolder(tmp_path / str(i), transcript=True)))
        ups = [m for m in transcript.read_transcript(tmp_path / str(i)) if (m.direction, m.exchange) == ("up", "local")]
        seen.append({(m.round, m.client): m.values for m in ups})
    assert_same(*runs)
    assert len(seen[0]) == 8
    for key, values in seen[0].items():
        assert not (values["SecureSums.masked"] == seen[1][key]["SecureSums.masked"]).any()


def test_killed_run_resumes_bitwise_equal(ring: InMemoryKeyring, tmp_path: Path) -> None:
    method = sealed(FedAvg(MOON(), **FAST), ring)
    whole = play(method, rounds=3)
    play(method, rounds=2, out=tmp_path / "run")
    # killed in the middle of round 3
    ring.save_session(1, {"step": "assent", "seed_of_run": 0, "round": 3, "shares": {}})
    assert_same(whole, play(method, rounds=3, out=tmp_path / "run", resume=True))


def test_killed_run_resumes_bitwise_equal_with_other_masks(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "ring")
    method = sealed(FedAvg(MOON(), **FAST), ring)
    whole = play(method, rounds=3)
    play(method, rounds=2, out=tmp_path / "run")
    # killed in the middle of round 3
    ring.save_session(1, {"step": "assent", "seed_of_run": 0, "round": 3, "shares": {}})
    assert_same(whole, play(method, rounds=3, out=tmp_path / "run", resume=True))


# Clients that drop out.


def losing(step: str) -> Any:
    def play(self: Dropping, client: Client, message: Message) -> Message:
        return self._lose(step, client, getattr(SecureSums, step)(self, client, message))

    return play


@dataclass(frozen=True, kw_only=True)
class Dropping(SecureSums):
    """Some clients fail at the end of a step of round 2, so others depend on them."""

    key = "SecureSums"
    step: str = ""
    lost: tuple[int, ...] = ()

    def _lose(self, step: str, client: Client, reply: Message) -> Message:
        if step == self.step and client.round == 2 and client.id in self.lost:
            raise ConnectionError("the line went dead")
        return reply

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        return self._lose("local", client, super().out(client, message, reply))

    announce, deal, assent, disclose = map(losing, ("announce", "deal", "assent", "disclose"))


class Absent(FedAvg):
    """One client fails in round 2."""

    absent = 3

    def local(self, client: Client, message: Message) -> Message:
        if client.round == 2 and client.id == self.absent:
            raise ConnectionError
        return super().local(client, message)


STEPS = ("announce", "deal", "local", "assent", "disclose")


@pytest.mark.parametrize("lost", [3, 1])
@pytest.mark.parametrize("step", STEPS)
def test_dropout_in_any_step_leaves_the_sum_of_the_others(step: str, lost: int, ring: InMemoryKeyring) -> None:
    run = play(sealed(FedAvg(**FAST), ring, Dropping, step=step, lost=(lost,)), rounds=3, evaluate="none")
    inside = step in ("assent", "disclose")
    absent = type("Absent", (Absent,), {"absent": lost})
    plain = play((FedAvg if inside else absent)(**FAST), rounds=3, evaluate="none")
    assert max_difference(run, plain) < 1e-6
    assert [row["accuracy"] for row in run.rows] == [row["accuracy"] for row in plain.rows]
    row = run.rows[1]
    assert list(row["failed"]) == ([] if inside else [str(lost)])
    assert ("failed_after" in row) == inside
    where = row["failed_after"][step][str(lost)] if inside else row["failed"][str(lost)]
    assert "the line went dead" in where
    assert row["secure_sum"] == {"clients": 4 if inside else 3, "recovered": 1 if step == "local" else 0}
    assert run.rows[2]["secure_sum"] == {"clients": 4, "recovered": 0}


@pytest.mark.parametrize("step", ["deal", "local", "disclose"])
def test_too_many_dropouts_end_the_round_with_the_reason(step: str, ring: InMemoryKeyring, tmp_path: Path) -> None:
    method = sealed(FedAvg(**FAST), ring, Dropping, step=step, lost=(1, 3))
    said = rf"after '{step}' 2 clients are left, fewer than threshold=3.*clients \[1, 3\] dropped out.*line went dead"
    refused(lambda: play(method, out=tmp_path / "run"), NoUsableReply, f"round 2: {said}")
    assert len((tmp_path / "run" / "history.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_no_sum_is_opened_without_all_shares_of_the_noise(
    ring: InMemoryKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, assent = [], SecureSums.assent
    monkeypatch.setattr(SecureSums, "assent", lambda self, c, m: [asked.append(c.round), assent(self, c, m)][1])
    method = sealed(feddm(), ring, Dropping, bounds=METHODS["SummedFedDM"][1], step="local", lost=(3,))
    refused(lambda: play(method, evaluate="none"), NoUsableReply, r"round 2: .* lacks the shares of clients \[3\]")
    assert asked == [1] * 4


# What the server sees.


def test_transcript_reveals_no_single_clients_values(
    ring: InMemoryKeyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare all messages of the server with each client's true values."""
    true: dict[tuple[int, ...], torch.Tensor] = {}
    encode = ReplyLayout.encode

    def watched(self: ReplyLayout, reply: Message) -> torch.Tensor:
        vector = encode(self, reply)
        true[len(true) // 4 + 1, len(true) % 4] = vector
        return vector

    monkeypatch.setattr(ReplyLayout, "encode", watched)
    method = sealed(FedAvg(SCAFFOLD(), **FAST), ring, bounds={SCAFFOLD.drift: 40.0})
    play(method, out=fl.RunFolder(tmp_path / "run", transcript=True))
    seen = list(transcript.read_transcript(tmp_path / "run"))
    ups = [m for m in seen if m.direction == "up"]
    assert {m.exchange for m in seen} == {"announce", "deal", "local", "assent", "disclose"}
    assert len(ups) == 2 * 4 * 5
    entries = {f"SecureSums.{n}" for n in ("bundles", "boxes", "masked", "signatures", "shares")}
    assert {k for m in ups for k in m.values} == entries
    for message in seen:  # as bytes: eight in a row of a client's numbers, or a value as it was trained, nowhere
        for key, value in message.values.items():
            if isinstance(value, torch.Tensor) and message.direction == "up":
                raw = value.numpy().tobytes()
                for vector in true.values():
                    assert not any(w.numpy().tobytes() in raw for w in vector[vector.abs() > 2**20][:40]), key
    masked = {(m.round, m.client): m.values["SecureSums.masked"] for m in ups if m.exchange == "local"}
    length = len(masked[1, 0])
    for r in (1, 2):
        for k in range(4):
            assert not (masked[r, k] == true[r, k])[true[r, k] != 0].any()
            assert abs(correlation(masked[r, k], true[r, k])) < 5 / length**0.5
    for k in range(4):  # nor does the difference of two rounds
        both, real = masked[2, k] - masked[1, k], true[2, k] - true[1, k]
        assert abs(correlation(both, real)) < 5 / length**0.5


def test_nothing_else_is_sent_in_clear(ring: InMemoryKeyring) -> None:
    """No weights, notes, evaluations on own images, or values in errors."""
    run = play(sealed(FedAvg(FedCOG(start_round=1, images=3, steps=1), **FAST), ring))
    assert not [row for row in run.rows if "noted" in row or "accuracy_clients" in row]
    assert {k.split(".")[0] for row in run.rows for k in row["up"]} == {"SecureSums"}
    tight = sealed(FedAvg(**FAST), ring, bounds={FedAvg.update: 1e-6})
    said = (
        r"FedAvg.update\[body.0.weight\] exceeds its public maximum 1e-06, or is NaN: use a smaller learning rate, or "
        r"a larger SecureSums\(bounds={FedAvg.update: ...}\) on the server and all clients"
    )
    with pytest.raises(NoUsableReply, match=said) as found:
        play(tight)
    rest = str(found.value).split("exceeds its public maximum 1e-06")[1].split("use a smaller")[0]
    assert not any(c.isdigit() for c in rest)


@dataclass(frozen=True, kw_only=True)
class Forging(SecureSums):
    """Some clients announce keys, or send signatures, that they did not sign."""

    key = "SecureSums"
    announced: tuple[int, ...] = ()
    signed: tuple[int, ...] = ()
    signed_in: int = 1

    def announce(self, client: Client, message: Message) -> Message:
        reply = super().announce(client, message)
        reply[self.bundles][0, 0] ^= client.id in self.announced
        return reply

    def assent(self, client: Client, message: Message) -> Message:
        reply = super().assent(client, message)
        reply[self.signatures][0, 0] ^= client.id in self.signed and client.round >= self.signed_in
        return reply


def test_forged_or_foreign_keys_and_signatures_are_excluded_by_name(ring: InMemoryKeyring) -> None:
    keys = (
        "client {0}: the keys of client {0} are not signed for this round by its key in the registry: they are forged, "
        "or from another round or keyring"
    )
    run = play(sealed(FedAvg(**FAST), ring, Forging, announced=(2,)), rounds=1)
    assert f"client 2: {run.rows[0]['failed']['2'].removeprefix('announce: ')}" == keys.format(2)
    forged = "client {}: its signature is invalid, or for another sum"
    for step, option, said in (("announce", "announced", keys), ("assent", "signed", forged)):
        few = (
            rf"after '{step}' 2 clients are left, fewer than threshold=3; clients \[0, 2\] dropped out, and no masks "
            rf"were removed; {said.format(0)}; {said.format(2)}; the state after round 0 is kept$"
        )
        method = sealed(FedAvg(**FAST), ring, Forging, **{option: (0, 2)})
        refused(lambda m=method: play(m), NoUsableReply, few)
    both = sealed(FedAvg(**FAST), ring, Forging, announced=(2,), signed=(1,), signed_in=2)
    assert "the keys of client 2 are not signed for this round" in play(both, rounds=1).rows[0]["failed"]["2"]
    refused(lambda: play(both, rounds=2), NoUsableReply, "client 1: its signature is invalid, or for another sum")
    method = sealed(FedAvg(**FAST), ring)
    ring.identities[2] = bytes(range(32))
    run = play(method, rounds=1)
    assert "ProtocolError: the keyring's key of client 2 is not its key in the registry" in run.rows[0]["failed"]["2"]
    assert run.rows[0]["secure_sum"] == {"clients": 3, "recovered": 0}


@dataclass(frozen=True, kw_only=True)
class Greedy(SecureSums):
    """A server that tells some clients in round 2 that client 3 has dropped out."""

    key = "SecureSums"

    def send_exchange(self, server: Any, verb: str, client: int) -> Message:
        message = super().send_exchange(server, verb, client)
        if verb == "assent" and server.round == 2 and client < 2:
            message[self.survivors] = message[self.survivors][:3]
        return message


def test_inconsistent_server_gets_no_shares(ring: InMemoryKeyring) -> None:
    refused(lambda: play(sealed(FedAvg(**FAST), ring, Greedy)), NoUsableReply, r"after 'assent' 2 clients are left")


# Refusals.


def test_value_above_its_maximum_and_another_layout_are_refused() -> None:
    schema: Schema = {Every.total.key: EntrySpec(torch.zeros(2))}
    layout = ReplyLayout.from_schema(schema, ENTRIES, {Every.total.key: 1.0}, 40, 4)
    for bad in (1.0001, float("nan"), float("inf")):
        with pytest.raises(BoundExceeded, match=r"Every.total exceeds its public maximum 1\b"):
            layout.encode(Message({Every.total: torch.tensor([0.0, bad])}))
    with pytest.raises(ValueError, match="the reply holds Every.weight, which the server does not expect"):
        layout.encode(Message({Every.total: torch.zeros(2), Every.weight: 1.0}))
    for odd in (torch.zeros(3), torch.zeros(2, dtype=torch.float64), 1.0, {"a": torch.zeros(2)}):
        with pytest.raises(ValueError, match="Every.total has another shape, dtype or type than the server expects"):
            layout.encode(Message.unchecked({Every.total.key: odd}))


@pytest.mark.parametrize(
    ("like", "said"),
    [
        (EntrySpec("a"), "Every.total is a str, which cannot be summed"),
        (EntrySpec(images(2, 0)), "Every.total is a LabeledImages, which cannot be summed"),
        (
            EntrySpec(torch.zeros(0, 2), max_rows=9),
            "Every.total has a number of rows that each client chooses, which a sum would reveal",
        ),
        (EntrySpec(torch.zeros(2), optional=True), "Every.total is not in every reply, which a sum would reveal"),
        (
            EntrySpec(torch.zeros(2), max_unit=2.0**-42.5),
            "bits=40 rounds Every.total to multiples of 9.09e-13, which would change or even remove the clients' "
            "shares of the noise: at most 1.61e-13 is allowed. Use bits=43, or a smaller maximum in bounds",
        ),
    ],
    ids=["text", "set", "rows", "optional", "rounded"],
)
def test_entries_that_cannot_be_summed_are_refused_by_name(like: EntrySpec, said: str) -> None:
    with pytest.raises(PrivacyError, match=said):
        ReplyLayout.from_schema({Every.total.key: like}, ENTRIES, {Every.total.key: 1.0}, 40, 4)


def test_weight_without_a_maximum_gets_the_default() -> None:
    for like in (EntrySpec(1.0), EntrySpec(1.0, maximum=5.0)):
        layout = ReplyLayout.from_schema({Every.weight.key: like}, ENTRIES, {}, 40, 4)
        assert [line.most for line in layout.entries] == [MAX_WEIGHT]
    with pytest.raises(ValueError, match="Every.over has no public maximum"):
        ReplyLayout.from_schema({Every.over.key: EntrySpec(torch.zeros(2))}, ENTRIES, {}, 40, 4)
    lopsided: Schema = {Every.over.key: EntrySpec(torch.zeros(2), minimum=-3.0, maximum=1.0, max_unit=3 / 2**40)}
    assert [line.most for line in ReplyLayout.from_schema(lopsided, ENTRIES, {}, 40, 4).entries] == [3.0]
    for low, bounds in ((-float("inf"), {}), (-1.0, {Every.over.key: 0.0})):
        schema: Schema = {Every.over.key: EntrySpec(torch.zeros(2), minimum=low, maximum=1.0)}
        with pytest.raises(ValueError, match="Every.over has no public maximum"):
            ReplyLayout.from_schema(schema, ENTRIES, bounds, 40, 4)


def test_secret_draws_and_queries_before_round_one_are_refused() -> None:
    drawing = Filtered(FedAvg(**{**FAST, "weights": "uniform"}), ClientDP(1.0, 0.5, 1.0))
    with pytest.raises(PrivacyError, match="Filtered draws its clients in secret, and may draw none; the clients"):
        require_sums(drawing)

    class Asking(FedAvg):
        has_query = True

    asking = FedAvg(Anchors(ipc=1, init="statistics"), **FAST)
    for method, name in ((Asking(**FAST), "Asking"), (asking, "Anchors")):
        said = f"{name} sends a request to every client before round 1, and each reply would be readable: remove it"
        refused(partial(require_sums, method), PrivacyError, said)


class Maximum(FedAvg):
    largest = Entry[float]("max")

    def expect(self, server: Any, client: int) -> Schema:
        return {**super().expect(server, client), self.largest.key: EntrySpec(0.0)}


class Reading(FedAvg):
    def read_reply(self, server: Any, reply: Message) -> Message:
        return Message()


@pytest.mark.parametrize(
    ("method", "said"),
    [(Maximum(**FAST), "Maximum.largest combines by 'max'"), (Reading(**FAST), "Reading reads single replies")],
    ids=["max", "reads"],
)
def test_methods_without_sums_are_refused_by_name(method: Method, said: str, ring: InMemoryKeyring) -> None:
    """The table of the page has the reasons for all public methods."""
    refused(lambda: play(sealed(method, ring)), PrivacyError, said)


def test_batch_norm_without_counters_is_summed(ring: InMemoryKeyring) -> None:
    method = sealed(FedAvg(**{**FAST, "factory": lambda n: Tiny(n, norm=True), "buffers": "drop"}), ring)
    assert play(method, rounds=1).rows[0]["secure_sum"]["clients"] == 4


@dataclass(frozen=True)
class Doubling(fl.Filter):
    """A filter before secure sums, with its own entry."""

    extra = Entry[float]("sum")

    def expect(self, server: Any, client: int, schema: Schema) -> None:
        schema[self.extra.key] = EntrySpec(1.0, minimum=-1.0, maximum=1.0)

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        other = reply.copy()
        other[FedAvg.update] = {n: 2 * t for n, t in reply[FedAvg.update].items()}
        other[self.extra] = 1.0
        return other

    def back(self, server: Any, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
        assert replies[self.extra] == pytest.approx(4.0)
        return replies.replace(FedAvg.update, {n: t / 2 for n, t in replies[FedAvg.update].items()})


def test_secure_sums_must_be_the_last_filter(ring: InMemoryKeyring) -> None:
    secure = SecureSums(ring.registry(4), keyring=ring, threshold=3, bounds={FedAvg.update: 8.0})
    with pytest.raises(PrivacyError, match="Doubling after it could not read them: pass SecureSums last"):
        Filtered(FedAvg(**FAST), secure, Doubling())
    averaging = FedAvg(**{**FAST, "weights": "uniform"})
    for chain in ((ClientDP(1.0, 0.5, 1.0), secure), (secure, ClientDP(1.0, 0.5, 1.0))):
        with pytest.raises(PrivacyError, match="ClientDP|SecureSums"):
            Filtered(averaging, *chain)
    assert max_difference(play(Filtered(FedAvg(**FAST), Doubling(), secure)), play(FedAvg(**FAST))) < 1e-6


class Growing(FedAvg):
    """Expects more of client 1 in round 2."""

    def expect(self, server: Any, client: int) -> Schema:
        more = {self.samples.key: EntrySpec(torch.zeros(2))} if (server.round, client) == (2, 1) else {}
        return {**super().expect(server, client), **more}


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"threshold": 2},
        "threshold must be more than half of the 4 clients of a round; got 2, with which the server could unmask two",
    ),
    ({"bounds": {Every.total: 1.0}}, "bounds names Every.total, which is not in the replies"),
    (
        {"bounds": {FedAvg.buffers: 1.0}},
        "bounds names FedAvg.buffers, which is not in the replies; the replies have FedAvg.samples, FedAvg.update$",
    ),
    ({"keyring": None}, "SecureSums has no keyring on this client: pass keyring=Keyring\\(folder\\)"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=["threshold", "another entry", "bounds", "keyring"])
def test_invalid_options_are_explained(options: dict[str, Any], said: str, ring: InMemoryKeyring) -> None:
    refused(lambda: play(sealed(FedAvg(**FAST), ring, **options)), (ValueError, NoUsableReply), said)


def test_missing_maximum_and_missing_key_are_named(ring: InMemoryKeyring) -> None:
    with pytest.raises(ValueError, match="FedAvg.update has no public maximum.*bounds={FedAvg.update: B}"):
        play(Filtered(FedAvg(**FAST), SecureSums(ring.registry(4), keyring=ring, threshold=3)))
    with pytest.raises(ValueError, match="client 3 is not in the registry"):
        play(Filtered(FedAvg(**FAST), SecureSums(ring.registry(3), keyring=ring, threshold=3)))
    few = ring.registry(2)
    said = f"client 2 is not in the registry ({few}): enrol every client, and build the registry from all of them"
    method = Filtered(FedAvg(**FAST), SecureSums(few, keyring=ring, threshold=2))
    refused(lambda: play(method), ValueError, escape(said))
    said = "the replies of client 1 in round 2 have another layout than client 0's at the start, so they cannot be"
    refused(lambda: play(sealed(Growing(**FAST), ring)), ValueError, said)


# The engine's part: exchanges of a method's own.


class Twice(FedAvg):
    """Has exchanges before and after the training; client 1 is rejected after the first, client 2 fails in the last."""

    said = Entry[float]("sum")
    exchanges = ("greet", "local", "part")

    def greet(self, client: Client, message: Message) -> Message:
        return Message({self.said: message[self.said] + client.id})

    def part(self, client: Client, message: Message) -> Message:
        if client.id == 2:
            raise ValueError("slept")
        return Message({self.said: 1.0})

    def send_exchange(self, server: Any, verb: str, client: int) -> Message:
        return Message({self.said: 10.0 * len(server.present)})

    def expect_exchange(self, server: Any, verb: str, client: int) -> Schema:
        return {self.said.key: EntrySpec(0.0)}

    def receive_exchange(self, server: Any, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        server.notes[verb] = [replies.clients, replies.get(self.said), list(server.present)]
        return {1: "was not polite"} if verb == "greet" else {3: "left early"} if verb == "part" else {}

    def receive(self, server: Any, replies: AggregatedReplies) -> None:
        server.notes["end"] = list(server.present)
        super().receive(server, replies)


def test_a_round_has_the_exchanges_of_the_method_and_no_others() -> None:
    (row,) = play(Twice(**FAST), rounds=1).rows
    assert row["greet"] == [[0, 1, 2, 3], 40.0 * 4 + 6, [0, 1, 2, 3]]
    assert row["local"] == [[0, 2, 3], None, [0, 2, 3]]
    assert (row["part"], row["end"]) == ([[0, 3], 2.0, [0, 3]], [0])
    assert row["failed"] == {"1": "greet: was not polite"}
    assert list(row["failed_after"]["part"]) == ["2", "3"]
    assert row["up"]["Twice.said"] == 8 * 6
    assert row["drawn"] == [0, 1, 2, 3]
    with pytest.raises(LookupError, match="FedAvg has no exchange 'receive'"):
        FedAvg(**FAST).run_on_client("receive", None, Message())  # type: ignore[arg-type]


class Killed(RuntimeError):
    pass


def test_run_killed_after_evaluation_keeps_its_committed_memories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation reads the pending memory; the committed one is needed if the round is not committed."""
    from fl.engine._rounds import RoundRunner

    method, commit = FedAvg(SCAFFOLD(), **FAST), RoundRunner._commit
    whole = play(method, rounds=3)

    def killed(self: RoundRunner, number: int, *rest: Any) -> None:
        if number == 2:
            raise Killed
        commit(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RoundRunner, "_commit", killed)
        patch.setattr("fl.engine._client_memory.MemoryStore.rollback", lambda self: None)  # a kill drops nothing
        with pytest.raises(Killed):
            play(method, rounds=3, out=tmp_path)
    assert_same(whole, play(method, rounds=3, out=tmp_path, resume=True))
