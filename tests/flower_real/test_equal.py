"""Equal hashes of methods on Flower and with threads. Needs Flower: `make test-flower`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import fl
from fl import simulate
from fl.study import outcome_hash
from tests.flower_real.deployed import APP, ROOT, Flower
from tests.flower_real.record import noting

sys.path.append(str(APP))
from dk_app import settings
from dk_app.settings import METHODS, SETTINGS, load_client

SIMULATED = ("FedAvg", "SCAFFOLD", "VHL", "FedCOG", "FedLGD", "FedDM", "SingleImage")
TRIES = 8
DEPLOYED = ("FedDM", "SCAFFOLD")


def run_with_threads(name: str, setting: str, clients: int) -> str:
    """Return the hash of a run with threads."""
    held = [load_client(k, clients) for k in range(clients)]
    return outcome_hash(simulate(METHODS[name](), held, test=settings.test_set(), progress=False, **SETTINGS[setting]))


def compared(
    found: dict[str, dict[str, Any]], names: tuple[str, ...], setting: str, clients: int
) -> list[dict[str, Any]]:
    """Return and print one row per method."""
    rows = []
    for name in names:
        line = found.get(name, {"hash": None, "failed": None, "seconds": None})
        row = {"method": name, "hash_threads": run_with_threads(name, setting, clients), "hash_flower": line["hash"]}
        rows.append({**row, "failed": line["failed"], "seconds": line["seconds"]})
        print(f"| {setting} | {' | '.join(map(str, rows[-1].values()))} |", flush=True)
    return rows


def require_equal(rows: list[dict[str, Any]]) -> None:
    """Check that hashes are equal and no client failed."""
    for row in rows:
        assert row["hash_flower"] == row["hash_threads"], row
        assert not any(row["failed"]), row


def run_simulation(flower: Flower, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Run in a simulation of four nodes, and return Flower's entry of the run and its log."""
    for tried in range(TRIES):  # Ray gives its own start 15 and 30 seconds, whatever the machine is busy with
        name = f"run{tried}"
        number = flower.begin(name, config, "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2")
        run, log = flower.end(name, number), flower.log(name)
        if "timed out during startup" not in log:
            break
    return run, log


def test_installed_packages_are_those_of_this_tree() -> None:
    assert Path(fl.__file__).parents[1] == ROOT


def test_methods_in_a_flower_simulation_equal_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with noting("simulated") as told:
        with Flower(simulation=True) as flower:
            out = flower.folder / "out"
            run, log = run_simulation(flower, {"methods": " ".join(SIMULATED), "setting": "simulated", "out": str(out)})
            found = flower.results(out)
        with capsys.disabled():
            print("\n| place | method | with threads | on Flower | failed | seconds |\n|---|---|---|---|---|---:|")
            told["rows"] = compared(found, SIMULATED, "simulated", 4)
        assert run["status"] == "finished:completed", log[-3000:]
        require_equal(told["rows"])
        assert {line["distillkit"] for line in found.values()} == {str(ROOT / "fl")}


def test_methods_on_deployed_nodes_equal_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with noting("deployed") as told:
        with Flower() as flower:
            out = flower.folder / "out"
            flower.start_nodes(2)
            number = flower.begin(
                "run", {"methods": " ".join(DEPLOYED), "setting": "deployed", "out": str(out), "max-concurrent": 1}
            )
            run = flower.end("run", number)
            found, log = flower.results(out), flower.log("run")
        with capsys.disabled():
            print()
            told["rows"] = compared(found, DEPLOYED, "deployed", 2)
        assert run["status"] == "finished:completed", log[-3000:]
        require_equal(told["rows"])
