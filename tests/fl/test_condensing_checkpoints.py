"""Runs that are interrupted while a client condenses its data: they continue there, with the bits of a whole run."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fl.addons.condensed as condensed_module
from distillkit.condense import load_state, save_state
from distillkit.data import load, partition
from distillkit.networks import ConvNet
from distillkit.sets import LabeledImages
from distillkit.study import Study, Task
from fl import FedAvg, RunFolder, simulate
from fl._codec import digest
from fl.addons import Condensed
from fl.engine.store import read_history, read_message
from fl.method import Method
from fl.methods import FedDM, FedLGD
from fl.participants import Client, Interrupted
from fl.study import Federated
from tests.fl.federations import images

SHAPE = (1, 4, 4)
TASK = Task(
    "digits", partial(load, "digits", size=8), partial(partition.iid, clients=2), rounds=2,
    factory_options={"width": 4, "depth": 1},
)  # fmt: skip
QUIET: dict[str, Any] = {"trial": False, "progress": False}


def network(outputs: int) -> ConvNet:
    return ConvNet(SHAPE, outputs, width=4, depth=1)


METHODS: dict[str, Any] = {
    "FedDM": lambda: FedDM(factory=network, ipc=1, steps=3, server_epochs=1),
    "FedLGD": lambda: FedLGD(
        factory=network, ipc=1, anchors=1, condense_steps=3, refine_steps=2, match_steps=1, selected=(1, 2), lr=0.1
    ),
    "Condensed": lambda: FedAvg(Condensed(ipc=1, steps=4, refine_steps=0), factory=network, steps=1, lr=0.1),
}


def play(method: Method, out: Any, **options: Any) -> Any:
    clients = [images(12, seed) for seed in range(3)]
    return simulate(method, clients, rounds=2, out=out, progress=False, **options)


def contents(path: Path) -> dict[str, Any]:
    """Return a digest of each entry of a state or memory, and the origin of each set."""
    message = read_message(path)[0]
    origins = {f"{k} {v.info}": True for k, v in message.items() if isinstance(v, LabeledImages)}
    return {key: digest(key, value) for key, value in message.items()} | origins


def files(out: Path) -> dict[str, Any]:
    """Return the model as bytes, the contents of state and memories, and the history without seconds."""
    found: dict[str, Any] = {p.name: p.read_bytes() for p in out.glob("checkpoint/model.safetensors")}
    found |= {p.name: contents(p) for p in out.glob("checkpoint/server.*.safetensors")}
    found |= {p.parent.name: contents(p) for p in sorted(out.glob("checkpoint/clients/*/*.safetensors"))}
    rows = read_history(out / "history.jsonl")
    return found | {"rows": [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_run_that_stops_after_every_step_of_condensing_equals_a_whole_run(
    tmp_path: Path, name: str, workers: int
) -> None:
    method, out, calls = METHODS[name], tmp_path / "pieces", 0
    play(method(), tmp_path / "whole")
    while True:
        calls += 1
        assert calls < 60
        try:
            play(method(), RunFolder(out, deadline=time.time()), resume=True, workers=workers)
            break
        except Interrupted:
            assert len(list(out.glob("checkpoint/unfinished/*/*/*.safetensors"))) > 0 or read_history(
                out / "history.jsonl"
            )
    steps = {"FedDM": 2 * 3 * 3, "FedLGD": 3 * (3 + 2), "Condensed": 3 * 4}[name]
    assert 4 <= calls <= steps + 2  # several clients may take a step before the run has stopped
    assert files(out) == files(tmp_path / "whole")
    assert not (out / "checkpoint" / "unfinished").exists()


KILLED = """
from pathlib import Path
import fl.addons.condensed as condensed
from tests.fl.test_condensing_checkpoints import METHODS, play
from fl.methods import FedDM
condensed.SAVE_INTERVAL = 0.0
play(METHODS["FedDM"](), {out!r}, resume=True)
"""


@pytest.mark.slow
def test_killed_run_resumes_a_condensation_and_leaves_no_state(tmp_path: Path) -> None:
    play(METHODS["FedDM"](), tmp_path / "whole")
    out, kills = tmp_path / "killed", 0
    while True:
        before = {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}
        process = subprocess.Popen([sys.executable, "-c", KILLED.format(out=str(out))])
        while process.poll() is None and kills < 3:
            now = {
                p for p in out.glob("checkpoint/unfinished/*/*/*.safetensors") if before.get(p) != p.stat().st_mtime_ns
            }
            if now:
                process.kill()
                kills += process.wait() != 0
        if process.wait() == 0:
            break
    assert kills == 3
    assert files(out) == files(tmp_path / "whole")
    assert not (out / "checkpoint" / "unfinished").exists()


def test_state_is_saved_each_minute_and_a_damaged_one_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(METHODS["FedDM"](), tmp_path / "whole")

    def killed(path: Path, state: Any) -> None:
        save_state(path, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(condensed_module, "SAVE_INTERVAL", 0.0)
        patch.setattr(condensed_module, "save_state", killed)
        with pytest.raises(KeyboardInterrupt):
            play(METHODS["FedDM"](), tmp_path / "run")
    [path] = (tmp_path / "run").glob("checkpoint/unfinished/1/0/*.safetensors")
    assert int(load_state(path)["step"]) == 1
    path.write_bytes(path.read_bytes()[:-8])
    play(METHODS["FedDM"](), tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_clients_have_no_scratch_folder_without_out_or_in_private_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def local(self: Any, client: Client, message: Any) -> Any:
        seen.append(client.scratch)
        return original(self, client, message)

    original = FedDM.local
    monkeypatch.setattr(FedDM, "local", local)
    play(METHODS["FedDM"](), None)
    assert set(seen) == {None}
    seen.clear()
    play(METHODS["FedDM"](), tmp_path)
    folders = [one.folder.relative_to(tmp_path / "checkpoint").as_posix() for one in seen if one is not None]
    assert sorted(folders) == [f"unfinished/{number}/{client}" for number in (1, 2) for client in range(3)]
    seen.clear()
    monkeypatch.setattr(FedDM, "private", True)
    play(METHODS["FedDM"](), tmp_path / "private")
    assert set(seen) == {None}


def test_study_stops_in_a_condensation_or_after_a_round_and_continues(tmp_path: Path) -> None:
    candidates = {
        "FedDM": Federated(FedDM, settings={"ipc": 1, "steps": 2, "server_epochs": 1}),
        "FedAvg": Federated(FedAvg, settings={"steps": 1}),
    }
    whole = Study(tmp_path / "whole", TASK, candidates, seeds=(0,)).run(**QUIET)
    pieces, calls = Study(tmp_path / "pieces", TASK, candidates, seeds=(0,)), 1
    while len(found := pieces.run(seconds=1e-6, **QUIET)) < 2:
        rounds = [len(read_history(path)) for path in (tmp_path / "pieces").rglob("history.jsonl")]
        assert sum(rounds) <= calls
        calls += 1
        assert calls < 20
    assert calls >= 2 * 2 + 2 - 1
    assert [r.line["hash"] for r in found] == [r.line["hash"] for r in whole]


def test_candidates_and_configurations_share_first_condensed_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedAvg on condensed data, its other rate, and FedLGD condense once for each seed, with the same bits as apart."""

    def averaging(factory: Any, lr: float, steps: int = 3) -> FedAvg:
        return FedAvg(Condensed(ipc=1, steps=steps, refine_steps=0), factory=factory, lr=lr, steps=1)

    given = {"ipc": 1, "anchors": 1, "condense_steps": 3, "refine_steps": 1, "match_steps": 1, "steps": 1}
    candidates: dict[str, Any] = {
        "FedAvg": Federated(averaging, settings={"lr": 0.1}),
        "Other rate": Federated(averaging, settings={"lr": 0.2}),
        "FedLGD": Federated(FedLGD, settings={"lr": 0.1, **given, "selected": (1, 2)}),
        "Other steps": Federated(averaging, settings={"lr": 0.1, "steps": 4}),
    }
    condensed: list[tuple[int, int]] = []

    def counted(client: Client, purpose: str, cache: Path | None) -> dict[str, Any]:
        options = checkpoints(client, purpose, cache)

        def callback(progress: Any) -> None:
            if purpose == "condense":
                condensed.append((client.seed, client.id))
            options["callback"](progress)

        return {**options, "callback": callback}

    checkpoints = condensed_module._checkpoints
    monkeypatch.setattr(condensed_module, "_checkpoints", counted)
    found = Study(tmp_path / "all", TASK, candidates, seeds=(0, 1)).run(**QUIET)
    assert len(condensed) == 2 * 2 * (3 + 4)
    assert len(list((tmp_path / "all" / "cache").iterdir())) == 2 * 2 * 2
    for name, candidate in candidates.items():
        alone = Study(tmp_path / name, TASK, {name: candidate}, seeds=(0, 1)).run(**QUIET)
        own = [r for r in found if r.method == name]
        assert [r.line["hash"] for r in own] == [r.line["hash"] for r in alone]
        memories = [[contents(p) for p in sorted(Path(str(r.folder)).glob("checkpoint/clients/*/*"))]
                    for r in (own[0], alone[0])]  # fmt: skip
        assert memories[0] == memories[1] != []
    rates = [next(r for r in found if r.method == name).line["client_seconds"] for name in ("FedAvg", "Other rate")]
    assert rates[1] > rates[0] / 3  # the seconds of condensing are counted for both
