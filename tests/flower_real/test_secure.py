"""Secure sums in a simulation of Flower: results equal to threads, and a client that drops out.

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
from tests.flower_real.record import noting
from tests.flower_real.test_equal import SETTINGS, load_client, run_simulation, settings

sys.path.append(str(APP))
from dk_app.sealed import SEALED, averaging, enrol, sealed

CLIENTS = 4


def run_with_threads(method: Any) -> Run:
    """Return a run with threads."""
    held = [load_client(k, CLIENTS) for k in range(CLIENTS)]
    return simulate(method, held, test=settings.test_set(), progress=False, **SETTINGS["secure"])


def max_difference(one: Run, other: Run) -> float:
    """Return the largest difference of a weight."""
    first, second = (dict(run.models[""].state_dict()) for run in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_secure_sums_in_a_flower_simulation_equal_threads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with noting("secure") as told, Flower(simulation=True) as flower:
        out = flower.folder / "out"
        enrol(out / "keys", CLIENTS)
        run, log = run_simulation(flower, {"methods": " ".join(SEALED), "setting": "secure", "out": str(out)})
        found = flower.results(out)
        assert run["status"] == "finished:completed", log[-3000:]
        enrol(tmp_path, CLIENTS)
        threads = {name: run_with_threads(sealed(name, tmp_path, node=True, **settings.FAST)) for name in SEALED}
        plain = run_with_threads(averaging(400, **settings.FAST))
        told["rows"] = [
            {
                "method": name, "hash_threads": outcome_hash(run), "hash_flower": found[name]["hash"],
                **{key: found[name][key] for key in ("secure_sum", "failed", "seconds")},
            }
            for name, run in threads.items()
        ]  # fmt: skip
        told["apart"] = max_difference(plain, threads["SecureSums"])
        with capsys.disabled():
            print(f"\n{json.dumps(told, indent=1)}", flush=True)
        for row in told["rows"]:
            assert row["hash_flower"] == row["hash_threads"]
        whole, left = told["rows"]
        assert whole["failed"] == [{}] * 3
        assert whole["secure_sum"] == [{"clients": 4, "recovered": 0}] * 3
        assert told["apart"] < 1e-6  # float32's own rounding
        assert [row["accuracy"] for row in plain.rows] == [row["accuracy"] for row in threads["SecureSums"].rows]
        assert [list(failed) for failed in left["failed"]] == [[], ["1"], []]
        assert "the line went dead" in left["failed"][1]["1"]
        assert left["secure_sum"] == [
            {"clients": 4, "recovered": 0}, {"clients": 3, "recovered": 1}, {"clients": 4, "recovered": 0},
        ]  # fmt: skip
