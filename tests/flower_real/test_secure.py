"""Secure sums in a simulation of Flower: the bits of threads, and a client that drops out.

Needs Flower: `make test-flower`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fl import Run, simulate
from fl.study import outcome_hash
from tests.flower_real.deployed import APP, Flower
from tests.flower_real.test_equal import SETTINGS, load_client, played, settings

sys.path.append(str(APP))
from dk_app.sealed import SEALED, averaging, enrol, sealed

CLIENTS = 4


def beside(method: Any) -> Run:
    """A run with threads."""
    held = [load_client(k, CLIENTS) for k in range(CLIENTS)]
    return simulate(method, held, test=settings.test_set(), progress=False, **SETTINGS["secure"])


def apart(one: Run, other: Run) -> float:
    """The largest difference of a weight."""
    first, second = (dict(run.models[""].state_dict()) for run in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_secure_sums_in_a_simulation_of_flower_are_those_of_threads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with Flower(simulation=True) as flower:
        out = flower.folder / "out"
        enrol(out / "keys", CLIENTS)
        run, log = played(flower, {"methods": " ".join(SEALED), "setting": "secure", "out": str(out)})
        found = flower.results(out)
    enrol(tmp_path, CLIENTS)
    threads = {name: beside(sealed(name, tmp_path, node=True, **settings.FAST)) for name in SEALED}
    plain = beside(averaging(400, **settings.FAST))
    with capsys.disabled():
        print("\n| method | with threads | on Flower | secure_sum | failed | seconds |\n|---|---|---|---|---|---:|")
        for name, line in found.items():
            hashes = f"{outcome_hash(threads[name])} | {line['hash']}"
            said = f"{json.dumps(line['secure_sum'])} | {json.dumps(line['failed'])} | {line['seconds']:.1f}"
            print(f"| {name} | {hashes} | {said} |", flush=True)
        print(f"largest difference of a weight from plain sums: {apart(plain, threads['SecureSums']):.2g}")
    assert run["status"] == "finished:completed", log[-3000:]
    assert {name: line["hash"] for name, line in found.items()} == {n: outcome_hash(r) for n, r in threads.items()}
    assert found["SecureSums"]["failed"] == [{}] * 3
    assert found["SecureSums"]["secure_sum"] == [{"clients": 4, "recovered": 0}] * 3
    assert apart(plain, threads["SecureSums"]) < 1e-6  # float32's own rounding
    assert [row["accuracy"] for row in plain.rows] == [row["accuracy"] for row in threads["SecureSums"].rows]
    (before, left, after) = found["Leaving"]["failed"]
    assert before == after == {}
    assert list(left) == ["1"]
    assert "the line went dead" in left["1"]
    assert [row["recovered"] for row in found["Leaving"]["secure_sum"]] == [0, 1, 0]
    assert [row["clients"] for row in found["Leaving"]["secure_sum"]] == [4, 3, 4]
