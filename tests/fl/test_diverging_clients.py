"""One finite but useless reply neither ends a run nor changes it: it counts as lost, and its client is named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fl
from fl.addons import SCAFFOLD, FedExP, FedNova, FedProx
from fl.engine._commit_guard import check_state
from fl.methods import FedDM, FedProto
from fl.participants import Client
from tests.fl.federations import Tiny, federation, images

TINY = partial(Tiny, norm=True)


def scaled(value: Any, to: float) -> Any:
    if isinstance(value, Tensor):
        return torch.full_like(value, to) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: scaled(part, to) for name, part in value.items()}
    return value.replace(images=scaled(value.images, to))


def hostile(kind: type, entry: fl.Entry[Any], to: float | None) -> type:
    """Return a subclass whose client 1 fills `entry` with `to` in round 3; its reply is lost if `to` is None."""

    class Hostile(kind):  # type: ignore[misc]
        def local(self, client: Client, message: fl.Message) -> fl.Message:
            reply = super().local(client, message)
            if client.id == 1 and client.round == 3:
                if to is None:
                    raise RuntimeError("lost")
                reply[entry] = scaled(reply[entry], to)
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


def test_jump_is_discarded_only_if_it_made_the_difference() -> None:
    """Weights of a client that trains from 1e20 diverge; those that did before this round, too, are no reason."""
    server = fl.simulate(method := fl.FedAvg(**AVERAGING), federation(), rounds=1, progress=False).server
    good = server.state[fl.FedAvg.model]

    def state(factor: float) -> fl.Message:
        changed = server.state.copy()
        changed[fl.FedAvg.model] = {n: t * factor if "classifier" in n else t for n, t in good.items()}
        return changed

    def judged(before: float, after: float) -> str | None:
        return check_state(method, replace(server, state=state(after)), state(before))[0]

    assert judged(1.0, 1.0) is None
    assert judged(1.0, 10.0) is None  # a jump after which a client still trains
    assert judged(1e20, 1e22) is None  # no worse than before
    why = judged(1.0, 1e20)
    assert why is not None
    assert why.startswith("a client with noise images fails with the new state")
    assert "NaN or Inf" in str(judged(1.0, float("inf")))
    good_until, bad_from = 1.0, 1e20
    while bad_from / good_until > 1.01:
        middle = (good_until * bad_from) ** 0.5
        good_until, bad_from = (middle, bad_from) if judged(1.0, middle) is None else (good_until, middle)
    assert judged(bad_from / 2.9, bad_from) is None  # such growth is not tried
    assert judged(bad_from / 3.1, bad_from) is not None


LARGE: dict[str, Any] = {"factory": Tiny, "lr": 1e-6, "batch": 8, "max_update_norm": 1e6}
"""With this rate, clients train from weights of any size."""


def explode(to: float, **options: Any) -> fl.Run:
    method = hostile(fl.FedAvg, fl.FedAvg.update, to)(**LARGE)
    return fl.simulate(method, federation(), rounds=4, seed=3, progress=False, **options)


def test_exploding_weights_are_reported_with_the_client() -> None:
    with pytest.warns(UserWarning, match=r"round 3: FedAvg.model\[.*grew more than tenfold; .* client 1\. Lower"):
        run = explode(1e3)
    assert run.rows[2]["exploded"]["clients"] == [1]
    assert all(name.startswith("FedAvg.model[") for name in run.rows[2]["exploded"]["entries"])
    assert not any("exploded" in row or row["failed"] for row in run.rows[:2] + run.rows[3:])


def test_run_with_exploding_weights_ends_on_request(tmp_path: Path) -> None:
    with pytest.raises(fl.NoUsableReply, match=r"round 3: .* client 1\. .*; the state after round 2 is kept"):
        explode(1e3, exploding="stop", out=tmp_path)
    assert len((tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    with pytest.raises(ValueError, match="exploding must be one of 'warn', 'stop'"):
        explode(1e3, exploding="ignore")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("to", [0.1, 10.0])
def test_ordinary_growth_is_not_reported(to: float) -> None:
    """The mean over four clients of a value of 10 stays below the limit of 10."""
    assert not any("exploded" in row for row in explode(to).rows)


@pytest.mark.parametrize("sign", [1, -1])
def test_explosion_is_relative_to_the_state_before(sign: int) -> None:
    server = fl.simulate(method := fl.FedAvg(**LARGE), federation(), rounds=1, progress=False).server

    def state(value: float) -> fl.Message:
        changed = server.state.copy()
        changed[fl.FedAvg.model] = {
            n: torch.full_like(t, sign * value) for n, t in server.state[fl.FedAvg.model].items()
        }
        return changed

    def exploded(before: float, after: float) -> bool:
        return bool(check_state(method, replace(server, state=state(after)), state(before))[1])

    assert not exploded(0.01, 10.0)
    assert exploded(0.01, 10.01)
    assert not exploded(50.0, 500.0)
    assert exploded(50.0, 501.0)


def test_statistics_of_batch_norm_do_not_explode() -> None:
    method = fl.FedAvg(factory=partial(Tiny, norm=True), lr=0.1, batch=8)
    server = fl.simulate(method, federation(), rounds=1, progress=False).server
    changed = server.state.copy()
    group = server.state[fl.FedAvg.model]
    assert any("running_var" in name for name in group)
    changed[fl.FedAvg.model] = {n: t * 1e4 if "running_" in n else t for n, t in group.items()}
    assert check_state(method, replace(server, state=changed), server.state)[1] == []


def test_images_of_the_state_do_not_explode() -> None:
    """FedDM's server state holds the clients' images, which start at the range of the pixels and may grow."""
    method = FedDM(**DISTILLING)
    server = fl.simulate(method, federation(), rounds=1, progress=False).server
    changed = server.state.copy()
    changed[FedDM.images] = server.state[FedDM.images].replace(images=server.state[FedDM.images].images * 1e4)
    assert check_state(method, replace(server, state=changed), server.state)[1] == []


def test_private_runs_name_no_client() -> None:
    method = fl.Filtered(
        hostile(fl.FedAvg, fl.FedAvg.update, 1e3)(**LARGE, weights="uniform"),
        fl.ClientDP(sigma=0.0, rate=1.0, clip=1e6),
    )
    rows = fl.simulate(method, federation(), rounds=4, seed=3, progress=False, secret=1).rows
    assert all(not row.get("exploded", {}).get("clients") for row in rows)
