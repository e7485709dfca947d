"""The engine: bitwise reproducibility, counts, named failures and checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distillkit import LabeledImages
from fl import CheckpointError, ClientData, FedAvg, FedDM, NoUsableReply, RunFolder, simulate
from fl.addons import FedProx
from fl.aggregation import EntrySpec
from fl.averaging.addon import AddOn
from fl.engine.store import Store, write_atomically
from fl.message import Entry
from fl.participants import Interrupted
from tests.fl.federations import Tiny, federation, images
from tests.refused import refused

SECONDS = ("seconds", "client_seconds", "server_seconds")


def timeless(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if k not in SECONDS} for row in rows]


def model(path: Path) -> bytes:
    return (path / "checkpoint" / "model.safetensors").read_bytes()


def feddm(**options: Any) -> FedDM:
    small = {"ipc": 2, "steps": 3, "server_epochs": 2, "server_batch": 8}
    return FedDM(factory=Tiny, **{**small, **options})


METHODS = {"fedavg": lambda: FedAvg(FedProx(0.1), factory=lambda k: Tiny(k, norm=True), momentum=0.9), "feddm": feddm}


def play(name: str, out: Path | RunFolder, rounds: int = 3, **options: Any) -> Any:
    held = [ClientData(c, images(8, seed=50 + k)) for k, c in enumerate(federation())]
    options = {"participation": 3, "test": images(30, 77), "seed": 4, "progress": False, **options}
    return simulate(METHODS[name](), held, rounds=rounds, out=out, **options)


CHILD = """
import sys; sys.path.insert(0, {root!r})
import torch; torch.set_num_threads(1)
from pathlib import Path
from tests.fl.test_simulate import play
play({name!r}, Path({out!r}), rounds=12, resume=True, workers=2)
"""


@pytest.mark.parametrize(("name", "delay"), [("fedavg", 0.05), pytest.param("feddm", 0.3, marks=pytest.mark.slow)])
def test_killed_run_resumes_bitwise_equal(name: str, delay: float, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    play(name, tmp_path / "whole", rounds=12)
    out = tmp_path / "killed"
    code = CHILD.format(root=root, name=name, out=str(out))
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not (out / "checkpoint" / "manifest.json").exists() and child.poll() is None:
        time.sleep(0.01)
    time.sleep(delay)
    child.kill()
    child.wait()
    play(name, out, rounds=12, resume=True)
    assert timeless(out) == timeless(tmp_path / "whole")
    assert model(out) == model(tmp_path / "whole")


def test_keyboard_interrupt_stops_and_keeps_the_last_round(tmp_path: Path) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            play("fedavg", tmp_path, rounds=50, on_round=interrupt)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("client", "server"))]
    assert Store(tmp_path).manifest()["round"] == 2  # type: ignore[index]


class Faulty(AddOn):
    """Clients 0 to 4 fail, each in its own way; the others succeed."""

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        k = local.client.id
        if k == 0:
            raise RuntimeError("no power")
        if k == 1:
            reply[FedAvg.update]["classifier.bias"][0] = float("nan")
        if k == 2:
            reply[FedAvg.update]["classifier.bias"] = torch.zeros(7)
        if k == 3:
            for key in [FedAvg.samples, FedAvg.update]:
                del reply[key]
        if k == 4:
            reply[FedAvg.samples] = float("inf")


def test_every_fault_is_counted_named_and_left_out() -> None:
    clients = [images(10, k) for k in range(7)]
    run = simulate(FedAvg(Faulty(), factory=Tiny), clients, rounds=1, min_replies=2, progress=False)
    failed = {client: why.split(" (line")[0] for client, why in run.rows[0]["failed"].items()}
    assert failed == {
        "0": "raised RuntimeError: no power",
        "1": "FedAvg.update[classifier.bias] holds NaN or Inf",
        "2": "FedAvg.update[classifier.bias] has shape [7], want [3]",
        "3": "sent nothing",
        "4": "FedAvg.samples holds NaN or Inf",
    }
    assert run.rows[0]["bytes_down"] == 7 * run.rows[0]["bytes_by_client"]["6"][1]


def test_too_few_replies_end_the_run_and_keep_the_last_round(tmp_path: Path) -> None:
    clients = [images(10, k) for k in range(7)]
    with pytest.raises(NoUsableReply, match=r"round 1: 2 usable replies, 3 are needed \(client 0 raised RuntimeError"):
        simulate(FedAvg(Faulty(), factory=Tiny), clients, rounds=1, min_replies=3, out=tmp_path, progress=False)

    class Later(Faulty):
        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            if local.round == 3:
                raise RuntimeError("gone")

    out = tmp_path / "later"
    with pytest.raises(NoUsableReply, match="the state after round 2 is kept"):
        simulate(FedAvg(Later(), factory=Tiny), clients, rounds=5, out=out, progress=False)
    assert len(timeless(out)) == 2
    assert Store(out).manifest()["round"] == 2  # type: ignore[index]


def test_clients_without_images_are_empty_and_not_failed() -> None:
    nobody = LabeledImages(torch.empty(0, 1, 4, 4), torch.empty(0, dtype=torch.long), num_classes=3)
    run = simulate(FedAvg(factory=Tiny), [images(9, 0), nobody], rounds=2, progress=False)
    assert run.rows[0]["empty"] == [1]
    assert run.rows[0]["failed"] == {}
    refused(lambda: simulate(FedAvg(factory=Tiny), [nobody] * 2, rounds=1), NoUsableReply, "no client had images")


def test_saved_model_is_the_evaluated_one(tmp_path: Path) -> None:
    run = play("fedavg", tmp_path)
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    net = Tiny(3, norm=True).eval()
    net.load_state_dict(saved)
    test = images(30, 77)
    assert run.accuracy_last == pytest.approx(float((net(test.images).argmax(1) == test.labels).float().mean()))


@pytest.mark.parametrize(("done", "number"), [(0, 0), (0, 1), (1, 2)])
def test_transcript_contains_what_the_server_received(done: int, number: int, tmp_path: Path) -> None:
    """Messages of a killed round, the one after `done` rounds or the query, are set aside when it is repeated."""
    from fl._codec import decode

    out, killed = RunFolder(tmp_path, transcript=True), tmp_path / "transcript" / str(number)
    if done:
        play("feddm", out, rounds=done)
    killed.mkdir(parents=True)
    (killed / "9-up.safetensors").write_bytes(b"of the killed round")
    run = play("feddm", out, rounds=2, resume=True)
    assert [path.name for path in (killed.parent / f"{number}.interrupted-1").iterdir()] == ["9-up.safetensors"]
    for row in run.rows:
        folder = tmp_path / "transcript" / str(row["round"])
        drawn = {f"{client}-{way}.safetensors" for client in row["drawn"] for way in ("down", "up")}
        assert {path.name for path in folder.iterdir()} == drawn
        for client in row["drawn"]:
            reply, facts = decode((folder / f"{client}-up.safetensors").read_bytes())
            assert facts == {"client": str(client), "round": folder.name}
            assert len(reply[FedDM.images]) > 0
            assert FedDM.model in decode((folder / f"{client}-down.safetensors").read_bytes())[0]


@dataclass(frozen=True)
class Diary(AddOn):
    """Clients count in how many rounds they were drawn."""

    pages = Entry[float]("sum")
    own = Entry[float]("first")

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        local.memory[self.own] = local.memory.get(self.own, 0.0) + 1.0
        reply[self.pages] = local.memory[self.own]

    def expect(self, server: Any, client: int, schema: Any) -> None:
        schema[self.pages.key] = EntrySpec(1.0)

    def receive(self, server: Any, replies: Any, old: Any) -> None:
        server.notes["pages"] = replies[self.pages]


# Checkpoints that cannot be used, and settings that differ.


def test_resuming_restores_the_model_of_the_last_completed_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the model's file and the manifest leaves a model and memories of a round that does not count."""
    options = {"out": tmp_path, "progress": False, "seed": 0}
    method, data = FedAvg(Diary(), factory=Tiny, lr=0.1), federation()
    simulate(method, data, rounds=1, **options)
    model = tmp_path / "checkpoint" / "model.safetensors"
    first, memories = model.read_bytes(), sorted(tmp_path.glob("checkpoint/clients/*/*"))

    def killed(path: Path, data: bytes) -> None:
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        write_atomically(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("fl.engine.store.write_atomically", killed)
        patch.setattr("fl.engine._client_memory.MemoryStore.rollback", lambda self: None)  # a kill drops nothing
        with pytest.raises(KeyboardInterrupt):
            simulate(method, data, rounds=2, resume=True, **options)
    assert model.read_bytes() != first
    assert len(list(tmp_path.glob("checkpoint/clients/*/*"))) > len(memories) > 0
    monkeypatch.setattr("fl.engine._run_record.versions", dict)  # as after an upgrade
    options["out"] = RunFolder(tmp_path, transcript=True, notes={"why": "a kill"})
    simulate(method, data, rounds=1, resume=True, **options)
    assert model.read_bytes() == first
    assert sorted(tmp_path.glob("checkpoint/clients/*/*")) == memories


def test_history_without_a_run_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"round": 9}\n', encoding="utf-8")
    play("fedavg", tmp_path, rounds=2)
    assert [row["round"] for row in timeless(tmp_path)] == [1, 2]


def test_folder_with_a_run_is_refused_without_resume_and_other_settings_by_name(tmp_path: Path) -> None:
    play("fedavg", tmp_path)
    refused(lambda: play("fedavg", tmp_path), ValueError, "holds a run already: pass resume=True")
    refused(lambda: play("fedavg", tmp_path, seed=5, resume=True), CheckpointError, "seed: was 4, now 5")
    refused(lambda: play("feddm", tmp_path, resume=True), CheckpointError, "method: was .*fl:FedAvg.*, now .*fl:FedDM")


def flat(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images * 0


def test_other_loss_augmentation_or_initial_weights_are_another_run(tmp_path: Path) -> None:
    start = {"classifier.bias": torch.ones(3)}
    options: list[dict[str, Any]] = [
        {},
        {"augment": flat},
        {"objective": torch.nn.CrossEntropyLoss()},
        {"initial": start},
    ]
    said = [repr(FedAvg(factory=Tiny, **o)) for o in options]
    assert len(set(said)) == 4
    assert all("0x" not in s and ".None" not in s for s in said)
    assert "objective=CrossEntropyLoss()" in said[2]
    simulate(FedAvg(factory=Tiny), federation(), rounds=1, out=tmp_path, progress=False)
    changed = FedAvg(factory=Tiny, augment=flat)
    with pytest.raises(CheckpointError, match=r"method\.augment: was .*, now .*\.flat"):
        simulate(changed, federation(), rounds=2, out=tmp_path, resume=True, progress=False)


def test_full_disk_error_names_the_file_and_keeps_the_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play("fedavg", tmp_path / "whole", rounds=3)
    out = tmp_path / "full"
    play("fedavg", out, rounds=2)
    real = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if "server.3" in self.name:
            real(self, data[:10])
            raise OSError(28, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        CheckpointError, match=r"^cannot write .*server\.3\.safetensors: No space left on device; the old file is kept$"
    ):
        play("fedavg", out, rounds=3, resume=True)
    monkeypatch.undo()
    assert Store(out).manifest()["round"] == 2  # type: ignore[index]
    play("fedavg", out, rounds=3, resume=True)
    assert timeless(out) == timeless(tmp_path / "whole")


def test_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    refused(lambda: play("fedavg", tmp_path / "file" / "run"), CheckpointError, "cannot write")
    (tmp_path / "checkpoint" / "clients.jsonl").mkdir(parents=True)
    refused(lambda: play("fedavg", tmp_path), CheckpointError, r"^/.*/clients\.jsonl cannot be deleted: \w[^\]]*$")


def test_run_ends_after_each_round_past_its_deadline(tmp_path: Path) -> None:
    out = RunFolder(tmp_path, deadline=0.0)
    for number in (1, 2):
        with pytest.raises(Interrupted, match=f"^the run stopped at its deadline, after round {number}$"):
            play("fedavg", out, resume=True)
    assert len(play("fedavg", out, resume=True).rows) == 3
