"""The page on scaling: tables equal its record, and formulas equal the costs of real rounds of every method."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fl.addons
import fl.methods
from distillkit import LabeledImages
from fl import FedDM, Method, Real, Run, simulate
from fl.message import payload_bytes
from fl.methods import FedLGD, FedProto, FedRep, PrivateFedDM, SingleImage, SummedFedDM
from tests.fl.federations import small
from tests.fl.test_addon_combinations import NAMES, OPTIONS, PICTURE, POOL, SHARED, Net, digits, plain
from tests.scripts import ROOT, load_script

sys.path.insert(0, str(ROOT / "docs" / "scripts"))
COSTS = load_script("docs/scripts/scaling_costs.py")
PAGE = load_script("docs/scripts/scaling.py")

IPC, ANCHORS, PATCHES, DRAWS, CLIENTS, CLASSES = 6, 5, 7, 11, 4, 3
DM: dict[str, Any] = {"factory": Net, "ipc": IPC, "steps": 1, "server_epochs": 1, "server_batch": 64}
DP: dict[str, Any] = {**DM, "factory": partial(small, side=8), "sigma": 2.0, "public_statistics": True}
LGD: dict[str, Any] = {"ipc": IPC, "selected": (2,), "refine_steps": 1, "augment": None, "batch_real": 4}
SMALLER: dict[str, dict[str, Any]] = {
    "Anchors": {"ipc": ANCHORS, "selected": (2,), "steps": 1},
    "Condensed": {**LGD, "steps": 1},
    "SharedImage": {"image": PICTURE, **SHARED, "keep": PATCHES},
    "SharedPool": {"pool": POOL, **{k: v for k, v in SHARED.items() if k != "count"}, "keep": PATCHES},
}
METHODS: dict[str, Callable[[], Method]] = {
    "FedAvg": plain,
    **{n: lambda n=n: plain(getattr(fl.addons, n)(**SMALLER.get(n, OPTIONS[n])), steps=1) for n in NAMES},  # type: ignore[misc]
    "FedRep": lambda: FedRep(factory=Net, head_epochs=1, lr=0.05, momentum=0.0, batch=16),
    "FedLGD": lambda: FedLGD(factory=Net, anchors=ANCHORS, condense_steps=1, match_steps=1, lr=0.05, **LGD),
    "SingleImage": lambda: SingleImage(PICTURE, shared={**SHARED, "keep": PATCHES}, factory=Net, epochs=1),
    "FedDM": lambda: FedDM(**DM),
    "Real": lambda: Real(**DM),
    "PrivateFedDM": lambda: PrivateFedDM(sigma_sizes=2.0, least=0, **DP),
    "SummedFedDM": lambda: SummedFedDM(sizes=[10, 10, 10], num_networks=DRAWS, **DP),
    "FedProto": lambda: FedProto(factory=Net, lr=0.05, batch=16),
}
"""Every public method and add-on, so that no two letters of the formulas have the same value but where they must."""


@cache
def clients() -> list[LabeledImages]:
    """Return four clients, each with eight images of two of the three classes and none in common."""
    data = digits()

    def of(label: int, client: int) -> Tensor:
        return (data.labels == label % CLASSES).nonzero().flatten()[8 * client :][:8]

    return [data[torch.cat([of(k, k), of(k + 1, k)])] for k in range(CLIENTS)]


def formula_variables(name: str, method: Method, run: Run) -> dict[str, float]:
    """Return the values of the formulas' variables in these runs."""
    network = next(iter(method.inner.architectures(CLASSES).values()))
    weights = list(network.state_dict().values())
    state = payload_bytes(run.server.state)
    return {
        "P": sum(t.numel() for t in weights), "T": len(weights), "x": 64, "K": CLASSES, "N": CLIENTS,
        "e": network.classifier.in_features,
        "H": sum(t.numel() for t in network.classifier.parameters()), "c": CLASSES if name == "PrivateFedDM" else 2,
        "i": IPC, "a": ANCHORS, "V": 9, "s": PATCHES, "q": 640 if name == "SharedPool" else 256, "d": DRAWS,
        "r": float("FedAvg.update" in run.rows[-1]["up"]), "G": state.get("FedGen.generator", 0) / 4,
        "O": state.get("FedGen.optimizer", 0),
    }  # fmt: skip


def test_every_public_method_and_add_on_has_formulas() -> None:
    public = {"FedAvg", "FedDM", *fl.addons.__all__, *fl.methods.__all__} - {"ClippedCrossEntropy"}
    named = [name for cost in COSTS.COSTS for name in cost.names]
    assert sorted(named) == sorted(public) == sorted(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_formulas_equal_measured_traffic_and_state(name: str) -> None:
    method = METHODS[name]()
    run = simulate(
        method, clients(), rounds=4 if "LGD" in name or name == "Anchors" else 2, progress=False, evaluate="none",
        server_data={"proxy": digits()[90:96], "test": digits()[90:96]}, **({"secret": 1} if method.private else {}),
    )  # fmt: skip
    assert not any(row["failed"] for row in run.rows)
    cost, values = COSTS.cost_of(name), formula_variables(name, method, run)
    first, row = run.rows[0]["down"], run.rows[-1]
    bodies = [key for key in first if f"{key.split(':')[0]}:digest" in first and not key.endswith(":digest")]
    assert {what: COSTS.bytes_of(getattr(cost, what), values) for what in ("up", "down", "once", "server")} == {
        "up": row["bytes_up"] / CLIENTS,
        "down": row["bytes_down"] / CLIENTS,
        "once": sum(first[key] for key in bodies) / CLIENTS,
        "server": sum(payload_bytes(run.server.state).values()),
    }


# The page.


def test_tables_of_the_page_equal_its_record() -> None:
    text = PAGE.PAGE.read_text(encoding="utf-8")
    assert {name for _, name, _ in PAGE.TABLE.findall(text)} == {*PAGE.TABLES, *PAGE.BARE}
    assert PAGE.filled(text) == text, "run python docs/scripts/scaling.py"


def test_record_has_every_case_once_from_a_clean_commit() -> None:
    bench = load_script("tests/benchmarks/bench_scaling.py")
    record = json.loads(PAGE.RECORD.read_text(encoding="utf-8"))
    found = [tuple(row[name] for name in bench.Case.__annotations__) for row in record["rows"]]
    assert sorted(found) == sorted((c.part, c.clients, c.drawn, c.weights, c.seed) for c in bench.cases())
    assert record["command"] == bench.COMMAND
    assert all(row["commit"] and "+" not in row["commit"] and row["seconds"] > 0 for row in record["rows"])
