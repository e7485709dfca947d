"""Private runs on deployed nodes: the epsilon of `simulate`, persistent node ledgers, and node policies.

Needs Flower: `make test-flower`. All runs are on one SuperLink and the same two SuperNodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distillkit.privacy import Ledger
from fl import simulate
from fl.deploy.flower import app_hash
from tests.flower_real.deployed import APP, Flower
from tests.flower_real.record import noting
from tests.flower_real.test_equal import METHODS, SETTINGS, load_client, settings

SETTING = {"first": "once", "second": "twice", "third": "once"}
RUNS = {"first": ("DPSGD", "PrivateFedDM"), "second": ("DPSGD",), "third": ("DPSGD",)}


def reference_epsilons() -> Iterator[list[float]]:
    """Yield the epsilons of each method's rounds in process, in successive runs on one ledger."""
    held, ledger = [load_client(k, 2) for k in range(2)], Ledger(None)
    for run in ("first", "second"):
        for name in RUNS[run]:
            how = SETTINGS[SETTING[run]]
            done = simulate(METHODS[name](), held, test=settings.test_set(), ledger=ledger, progress=False, **how)
            yield [row["epsilon"] for row in done.rows]


def write_policy(path: Path, *, epsilon: float = 8.0, smallest_sigma: float = 2.0) -> None:
    """Write a node's policy that pins this version of the app."""
    said: dict[str, Any] = {
        "epsilon": epsilon, "delta": 1e-5, "smallest_sigma": smallest_sigma, "largest_rate": 1.0,
        "methods": ["FedAvg(DPSGD)", "PrivateFedDM"], "evaluation": False, "app": app_hash(APP / "dk_app"),
    }  # fmt: skip
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in said.items()]
    path.write_text("".join([*lines, "largest_clip = inf\n"]), encoding="utf-8")


def spent_epsilon(node: Path) -> float | None:
    """Return the epsilon of all runs together in a node's ledger."""
    (path,) = node.glob("ledgers/*.jsonl")
    return Ledger(path, disjoint=False).epsilon()


def test_private_runs_compose_on_the_nodes_within_their_policies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with noting("private") as told:
        wanted = list(reference_epsilons())
        told["rows"] = [
            {"run": run, "method": name, "simulate": wanted.pop(0)} for run in ("first", "second") for name in RUNS[run]
        ]
        _play(told)
        with capsys.disabled():
            print(f"\n{json.dumps(told, indent=1)}", flush=True)
        _require(told)


def _play(told: dict[str, Any]) -> None:
    """Run all runs, and collect their results."""
    found, told["status"] = {}, {}
    third, _ = told["rows"][-1]["simulate"]
    with Flower() as flower:
        nodes = [flower.folder / f"node{k}" for k in range(2)]
        policies = [flower.folder / f"policy{k}.toml" for k in range(2)]
        write_policy(policies[0], epsilon=third)  # pays for the first three releases
        write_policy(policies[1])
        for k in range(2):
            flower.start_node(f"node{k}", k, 2, config=f'folder="{nodes[k]}" policy="{policies[k]}"')
        for name, methods in RUNS.items():
            if name == "third":
                write_policy(policies[1], smallest_sigma=4.0)
            out = flower.folder / name
            config = {"methods": " ".join(methods), "setting": SETTING[name], "out": str(out), "max-concurrent": 1}
            number = flower.begin(name, config)
            told["status"][name] = flower.end(name, number)["status"]
            found[name], log = flower.results(out), flower.log(name)
            print(f"== {name}\n{log[-3000:]}")
        told["ledgers"] = [spent_epsilon(node) for node in nodes]
    for row in told["rows"]:
        line = found[row["run"]].get(row["method"], {})
        row |= {"flower": line.get("epsilon"), "failed": line.get("failed")}
    told["raised"] = [line for line in log.splitlines() if "NoUsableReply" in line][-1:]


def _require(told: dict[str, Any]) -> None:
    """Check the collected results."""
    assert told["status"] == {
        "first": "finished:completed", "second": "finished:completed", "third": "finished:failed",
    }  # fmt: skip
    for row in told["rows"]:
        assert row["flower"] == row["simulate"], row
    first, other, (third, fourth) = (row["simulate"] for row in told["rows"])
    assert 0 < first[0] < other[0] < third < fourth
    assert [row["failed"] for row in told["rows"][:2]] == [[{}]] * 2
    before, after = told["rows"][2]["failed"]
    assert before == {}
    assert list(after) == ["0"]
    spent = "refused: the budget of its policy is spent: dp_sgd for client '0' would bring epsilon to "
    assert after["0"].startswith(spent)
    (raised,) = told["raised"]
    assert f"client 0 {spent}" in raised
    assert "client 1 refused: its policy says smallest_sigma = 4, and dp_sgd has 2" in raised
    assert told["ledgers"] == [third, fourth]
