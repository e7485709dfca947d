"""Faults on deployed nodes, and their records in the history. Needs Flower: `make test-flower-faults`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.flower_real.deployed import Flower, wait_for
from tests.flower_real.record import noting
from tests.flower_real.test_equal import run_with_threads

ONE = {"max-concurrent": 1}
"""One client at a time: a round can be interrupted after one reply, and machines keep up with the heartbeats."""


def deployed() -> Flower:
    """Return a SuperLink with its state in a file."""
    return Flower(link=("--database", "state.db"))


def test_killed_and_hanging_clients_return_and_an_empty_round_fails() -> None:
    with noting("mishaps") as told:
        with deployed() as flower:
            out = flower.folder / "out"
            flower.start_nodes(2)
            number = flower.begin(
                "first", {"methods": "FedDM Mishaps", "setting": "once faults", "out": str(out), **ONE}
            )
            first = flower.end("first", number)
            number = flower.begin("second", {"methods": "Failing", "setting": "once", "out": str(out), **ONE})
            second = flower.end("second", number)
            found, logs = flower.results(out), {name: flower.log(name) for name in ("first", "second")}
        told["mishaps"] = found["Mishaps"]["failed"]
        told["status"] = {"first": first["status"], "second": second["status"]}
        print(json.dumps(found, indent=1), logs["first"][-2000:], logs["second"][-2000:])
        assert first["status"] == "finished:completed"
        assert found["FedDM"]["failed"] == [{}]
        assert found["FedDM"]["hash"] == run_with_threads("FedDM", "once", 2)
        killed, hung, after = found["Mishaps"]["failed"]
        assert list(killed) == ["0"]
        assert killed["0"].startswith("lost: ")
        assert hung == {"1": "did not answer before its deadline, and was stopped"}
        assert after == {}
        assert second["status"] == "finished:failed"
        assert "NoUsableReply" in logs["second"]
        for client in range(2):  # both nodes reply in the next run, also the one that hung
            assert f"client {client} raised RuntimeError: client {client} cannot" in logs["second"]


def pending(out: Path, number: int) -> list[Path]:
    """Return the memories that clients wrote in a round."""
    return list(out.glob(f"nodes/*/*/*/memory/*/{number}-*.safetensors"))


def rounds(out: Path) -> int:
    """Return the number of rounds in the history."""
    return len((out / "runs" / "SCAFFOLD" / "history.jsonl").read_text(encoding="utf-8").splitlines())


def test_killed_server_and_restarted_superlink_change_no_bit() -> None:
    with noting("restarts") as told:
        with deployed() as flower:
            out = flower.folder / "out"
            config = {"methods": "SCAFFOLD", "setting": "killed", "out": str(out), **ONE}
            flower.start_nodes(2)
            numbers = [flower.begin("first", config)]
            dropped = wait_for(lambda: pending(out, 2), "an answer in round 2")
            os.kill(int((out / "server.pid").read_text(encoding="utf-8")), signal.SIGKILL)
            assert rounds(out) == 1  # so the memories of round 2 are of a round that never was
            flower.kill("first")
            numbers.append(flower.begin("second", config))
            dropped += wait_for(lambda: pending(out, 3), "an answer in round 3")
            flower.kill("link")
            assert rounds(out) == 2
            flower.kill("second")
            flower.start_link()
            numbers.append(flower.begin("third", config))
            runs = [flower.end("third", numbers[-1]), *(flower.status(number) for number in numbers[:2])]
            found, log = flower.results(out), flower.log("third")
            left = [path for path in dropped if path.exists()]
        told["status"] = [run["status"] for run in runs]
        print(told["status"], log[-3000:])
        assert runs[0]["status"] == "finished:completed"
        assert not any(run["status"] == "finished:completed" for run in runs[1:])
        assert found["SCAFFOLD"]["hash"] == run_with_threads("SCAFFOLD", "killed", 2)
        assert found["SCAFFOLD"]["failed"] == [{}] * 3
        assert not left
