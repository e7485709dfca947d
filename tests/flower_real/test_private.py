"""Private runs on deployed nodes: the epsilon of `simulate`, nodes that remember what they paid, owners who say no.

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
from fl.engine.flower import app_hash
from tests.flower_real.deployed import APP, Flower
from tests.flower_real.test_equal import METHODS, SETTINGS, load_client, settings

SETTING = {"first": "once", "second": "twice", "third": "once"}
RUNS = {"first": ("DPSGD", "PrivateFedDM"), "second": ("DPSGD",), "third": ("DPSGD",)}


def beside() -> Iterator[list[float]]:
    """The epsilons of each method's rounds in process, one run after the other on one ledger."""
    held, ledger = [load_client(k, 2) for k in range(2)], Ledger(None)
    for run in ("first", "second"):
        for name in RUNS[run]:
            how = SETTINGS[SETTING[run]]
            done = simulate(METHODS[name](), held, test=settings.test_set(), ledger=ledger, progress=False, **how)
            yield [row["epsilon"] for row in done.rows]


def write_policy(path: Path, *, epsilon: float = 8.0, smallest_sigma: float = 2.0) -> None:
    """What a node's owner allows, of this version of the app."""
    said: dict[str, Any] = {
        "epsilon": epsilon, "delta": 1e-5, "smallest_sigma": smallest_sigma, "largest_rate": 1.0,
        "methods": ["FedAvg(DPSGD)", "PrivateFedDM"], "evaluation": False, "app": app_hash(APP / "dk_app"),
    }  # fmt: skip
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in said.items()]
    path.write_text("".join([*lines, "largest_clip = inf\n"]))


def paid(node: Path) -> float | None:
    """What all runs together have cost a record of a node, as its own ledger says."""
    (path,) = node.glob("ledgers/*.jsonl")
    return Ledger(path, disjoint=False).epsilon()


def test_private_runs_compose_on_the_nodes_and_their_owners_have_the_last_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, other, (third, fourth) = beside()
    found, runs, logs = {}, {}, {}
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
            config = {"methods": " ".join(methods), "setting": SETTING[name], "out": str(out), "at-once": 1}
            number = flower.begin(name, config)
            runs[name], found[name] = flower.end(name, number), flower.results(out)
            logs[name] = flower.log(name)
        ledgers = [paid(node) for node in nodes]
    failed = found["second"]["DPSGD"]["failed"] if found["second"] else None
    refused = [line for line in logs["third"].splitlines() if "NoUsableReply" in line]
    with capsys.disabled():
        print("\n| run | method | epsilon of simulate | epsilon on Flower |\n|---|---|---|---|")
        for name, methods, wanted in (
            ("first", "DPSGD", first), ("first", "PrivateFedDM", other), ("second", "DPSGD", [third, fourth]),
        ):  # fmt: skip
            print(f"| {name} | {methods} | {wanted} | {found[name].get(methods, {}).get('epsilon')} |")
        said = {"failed": failed, "third": refused[-1:], "status": {n: run["status"] for n, run in runs.items()}}
        print(json.dumps({**said, "ledgers": ledgers}, indent=1), flush=True)
    print(*(f"== {name}\n{log[-3000:]}" for name, log in logs.items()), sep="\n")
    assert [runs[name]["status"] for name in ("first", "second")] == ["finished:completed"] * 2
    assert found["first"]["DPSGD"]["epsilon"] == first
    assert found["first"]["PrivateFedDM"]["epsilon"] == other
    assert not any(row for line in found["first"].values() for row in line["failed"])
    assert 0 < first[0] < other[0] < third < fourth
    assert found["second"]["DPSGD"]["epsilon"] == [third, fourth]
    assert failed is not None
    before, after = failed
    assert before == {}
    assert list(after) == ["0"]
    spent = "refused: the budget of its policy is spent: dp_sgd for client '0' would bring epsilon to "
    assert after["0"].startswith(spent)
    assert runs["third"]["status"] == "finished:failed"
    assert f"client 0 {spent}" in refused[-1]
    assert "client 1 refused: its policy says smallest_sigma = 4, and dp_sgd has 2" in refused[-1]
    assert ledgers == [third, fourth]
