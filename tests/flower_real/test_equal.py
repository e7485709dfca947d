"""The methods on Flower and with threads: the same hashes. Needs Flower: `make test-flower`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import fl
from fl import simulate
from fl.study import outcome_hash
from tests.flower_real.deployed import APP, ROOT, Flower

sys.path.append(str(APP))
from dk_app import settings
from dk_app.settings import METHODS, SETTINGS, load_client

SIMULATED = ("FedAvg", "SCAFFOLD", "VHL", "FedCOG", "FedLGD", "FedDM", "SingleImage")
TRIES = 8
DEPLOYED = ("FedDM", "SCAFFOLD")


def beside(name: str, setting: str, clients: int) -> str:
    """The hash with threads."""
    held = [load_client(k, clients) for k in range(clients)]
    return outcome_hash(simulate(METHODS[name](), held, test=settings.test_set(), progress=False, **SETTINGS[setting]))


def compared(found: dict[str, dict[str, Any]], names: tuple[str, ...], setting: str, clients: int) -> list[str]:
    """A line a method for the table, and the names of those that differ."""
    differ = []
    for name in names:
        line, wanted = found.get(name), beside(name, setting, clients)
        same = line is not None and line["hash"] == wanted and not any(line["failed"])
        print(
            f"| {setting} | {name} | {wanted} | {line['hash'] if line else 'none'} | {'equal' if same else 'DIFFERS'} "
            f"| {line['seconds'] if line else 0:.1f} |",
            flush=True,
        )
        if not same:
            differ.append(name)
    return differ


def played(flower: Flower, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Play a run in a simulation of four nodes: what Flower says of it, and its log."""
    for tried in range(TRIES):  # Ray gives its own start 15 and 30 seconds, whatever the machine is busy with
        name = f"run{tried}"
        number = flower.begin(name, config, "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2")
        run, log = flower.end(name, number), flower.log(name)
        if "timed out during startup" not in log:
            break
    return run, log


def test_the_tree_that_is_tested_is_this_one() -> None:
    assert Path(fl.__file__).parents[1] == ROOT


def test_methods_in_a_simulation_of_flower_have_the_hashes_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with Flower(simulation=True) as flower:
        out = flower.folder / "out"
        config = {"methods": " ".join(SIMULATED), "setting": "simulated", "out": str(out)}
        run, log = played(flower, config)
        found = flower.results(out)
    with capsys.disabled():
        print("\n| place | method | with threads | on Flower | | seconds |\n|---|---|---|---|---|---:|")
        differ = compared(found, SIMULATED, "simulated", 4)
    assert run["status"] == "finished:completed", log[-3000:]
    assert not differ
    assert {line["distillkit"] for line in found.values()} == {str(ROOT / "fl")}


def test_methods_on_deployed_nodes_have_the_hashes_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with Flower() as flower:
        out = flower.folder / "out"
        for partition in range(2):
            flower.start_node(f"node{partition}", partition, 2)
        number = flower.begin(
            "run", {"methods": " ".join(DEPLOYED), "setting": "deployed", "out": str(out), "at-once": 1}
        )
        run = flower.end("run", number)
        found, log = flower.results(out), flower.log("run")
    with capsys.disabled():
        print()
        differ = compared(found, DEPLOYED, "deployed", 2)
    assert run["status"] == "finished:completed", log[-3000:]
    assert not differ
