"""The checkpoint before the last one is kept: a run whose last checkpoint is damaged continues from there."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distillkit.privacy import Ledger
from fl import CheckpointError, FedAvg, Run, simulate
from fl.addons import DPSGD, SCAFFOLD
from fl.engine._client_memory import MemoryStore
from fl.engine.store import Store
from fl.message import Message
from tests.fl.federations import Tiny, federation
from tests.fl.flower import fake_flower
from tests.fl.flower.test_runs import FAST, assert_equal, grid, run_in_threads, run_on_grid
from tests.fl.invariances import assert_same
from tests.refused import refused


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def newest_state(out: Path) -> Path:
    return out / "checkpoint" / str(json.loads((out / "checkpoint" / "manifest.json").read_bytes())["server"])


def drop_last_row(out: Path) -> None:
    path = out / "history.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def change_last_row(out: Path) -> None:
    path = out / "history.jsonl"
    *rows, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*rows, last.replace(b'"seconds": ', b'"seconds": 9')]))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "state flipped": lambda out: flip(newest_state(out)),
    "state missing": lambda out: newest_state(out).unlink(),
    "state cut": lambda out: newest_state(out).write_bytes(newest_state(out).read_bytes()[:100]),
    "manifest flipped": lambda out: (out / "checkpoint" / "manifest.json").write_bytes(b"{"),
    "manifest missing": lambda out: (out / "checkpoint" / "manifest.json").unlink(),
    "row missing": drop_last_row,
    "row changed": change_last_row,
}


def play(out: Path | None, rounds: int, **options: Any) -> Run:
    method = FedAvg(SCAFFOLD(), factory=Tiny, steps=1, lr=0.1)
    return simulate(method, federation(), rounds=rounds, participation=3, seed=0, out=out, progress=False, **options)


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_checkpoint_costs_one_round(damage: str, tmp_path: Path) -> None:
    """The clients' memories of the round before are there too, so the result is the same to the bit."""
    play(tmp_path, 4)
    DAMAGE[damage](tmp_path)
    with pytest.warns(UserWarning, match="goes on from the checkpoint before it, of round 3"):
        run = play(tmp_path, 6, resume=True)
    assert_same(run, play(None, 6))
    assert [row["round"] for row in Store(tmp_path).rows()] == [1, 2, 3, 4, 5, 6]
    assert play(tmp_path, 6, resume=True).rows == run.rows  # the folder is whole again: no warning


def test_damage_every_round_still_ends(tmp_path: Path) -> None:
    for rounds in range(2, 5):
        play(tmp_path, rounds, resume=(tmp_path / "config.json").exists())
        flip(newest_state(tmp_path))
        with pytest.warns(UserWarning, match=f"of round {rounds - 1}"):
            play(tmp_path, rounds, resume=True)
    assert_same(play(tmp_path, 5, resume=True), play(None, 5))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("state flipped", r"server\.1\.safetensors.*does not match its checksum"),
        ("state missing", r"server\.1\.safetensors is missing: restore it"),
        ("state cut", r"server\.1\.safetensors.*damaged or truncated"),
        ("manifest flipped", r"manifest\.json is damaged"),
    ],
)
def test_without_an_older_checkpoint_the_damage_is_named(damage: str, said: str, tmp_path: Path) -> None:
    play(tmp_path, 1)
    DAMAGE[damage](tmp_path)
    refused(lambda: play(tmp_path, 2, resume=True), CheckpointError, said)


def test_two_damaged_checkpoints_are_refused_and_nothing_is_deleted(tmp_path: Path) -> None:
    play(tmp_path, 3)
    states = sorted((tmp_path / "checkpoint").glob("server.*.safetensors"))
    assert [p.name for p in states] == ["server.2.safetensors", "server.3.safetensors"]
    for path in states:
        flip(path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"}
    refused(lambda: play(tmp_path, 4, resume=True), CheckpointError, r"server\.3\.safetensors")
    assert {p: p.read_bytes() for p in before} == before


def test_a_row_of_an_earlier_round_cannot_be_lost(tmp_path: Path) -> None:
    play(tmp_path, 4)
    path = tmp_path / "history.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"seconds": ', b'"seconds": 9', 1))
    refused(lambda: play(tmp_path, 5, resume=True), CheckpointError, "checksum differs")


@pytest.mark.parametrize("damage", ["state flipped", "manifest flipped"])
def test_flower_nodes_return_to_the_round_before(damage: str, tmp_path: Path) -> None:
    """Rows are open for a round, because clients are evaluated with the next round's requests."""
    method, out = FedAvg(SCAFFOLD(), **FAST), tmp_path / "run"
    with fake_flower.installed():
        there = grid(method, tmp_path / "nodes")
        run_on_grid(there, method, rounds=4, out=out)
        DAMAGE[damage](out)
        with pytest.warns(UserWarning, match="of round 3"):
            run = run_on_grid(there, method, rounds=5, out=out, resume=True)
    assert_equal(run, run_in_threads(method, rounds=5))


def test_a_repeated_private_round_is_charged_again(tmp_path: Path) -> None:
    method = FedAvg(DPSGD(sigma=3.0, rate=0.5, size=12), factory=Tiny, steps=1, lr=0.1, weights="uniform")

    def part(rounds: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            simulate(method, federation(), rounds=rounds, out=tmp_path, resume=rounds > 3, progress=False)

    def charges() -> list[int]:
        return [e.round for e in Ledger(tmp_path / "ledger.jsonl", delta=1e-5).events if e.client == "0"]

    part(3)
    assert charges() == [1, 2, 3]
    flip(newest_state(tmp_path))
    part(4)
    assert charges() == [1, 2, 3, 3, 4]


def memory(value: float) -> Message:
    return Message({FedAvg.samples: value})


@pytest.mark.parametrize("numbers", [(2, 5, 11), (5, 10, 11)])
def test_memory_of_the_round_before_is_kept_in_a_folder(numbers: tuple[int, ...], tmp_path: Path) -> None:
    store, before = MemoryStore(tmp_path), f"{numbers[1]}-ab-1"
    kept = sorted([before, "11-ab-1"])
    for number in numbers:
        store.stage(0, f"{number}-ab-0", memory(0))  # of a failed attempt
        store.stage(0, f"{number}-ab-1", memory(number))
        store.commit({0: f"{number}-ab-1"})
    assert sorted(p.stem for p in (tmp_path / "0").iterdir()) == kept
    store.stage(0, "12-ab-2", memory(12))  # rejected by the server, so it names the version before
    assert store.load(0, "11-ab-1")[FedAvg.samples] == 11
    assert sorted(p.stem for p in (tmp_path / "0").iterdir()) == kept
    store.restore({0: before})
    assert [p.stem for p in (tmp_path / "0").iterdir()] == [before]
    store.restore({})
    assert not list((tmp_path / "0").iterdir())


def test_memory_without_a_folder_has_one_version() -> None:
    store = MemoryStore(None)
    for number in (1, 2):
        store.stage(0, f"{number}-ab-1", memory(number))
        store.commit({0: f"{number}-ab-1"})
    for other, version in ((store, "1-ab-1"), (MemoryStore(None), "2-ab-1")):
        said = f"^client 0 has lost its memory of version {version}: start the run again$"
        refused(partial(other.load, 0, version), CheckpointError, said)
