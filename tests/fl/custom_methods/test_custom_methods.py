"""Tests of an add-on and a method that a user could write from the documentation."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from fl import ClientData, FedAvg, Networks, Run, simulate
from fl.addons import SCAFFOLD, FedProx
from tests.fl import quadratic
from tests.fl.custom_methods.feddyn import FedDyn
from tests.fl.custom_methods.fedmd import FedMD
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import assert_same
from tests.refused import refused

HERE = Path(__file__).parent


@pytest.mark.parametrize(("name", "most"), [("feddyn", 35), ("fedmd", 50)])
def test_custom_methods_are_short_and_use_public_names_only(name: str, most: int) -> None:
    tree = ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))
    [kind] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    lines = {n.lineno for node in kind.body[1:] for n in ast.walk(node) if hasattr(n, "lineno")}
    assert len(lines) <= most
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("fl", "distillkit"):
            assert not [alias.name for alias in node.names if alias.name.startswith("_")], node.module


@pytest.mark.parametrize(("participation", "mu"), [(1.0, 0.0), (2, 0.0), (2, 0.5)])
def test_rounds_of_feddyn_follow_algorithm_1(participation: float | int, mu: float) -> None:
    alpha, lr, steps = 0.4, 0.1, 4
    addons = [FedDyn(alpha), FedProx(mu)]
    result = quadratic.run(
        *addons, rounds=5, participation=participation, lr=lr, steps=steps, batch=9, weights="uniform"
    )
    w, h, g = quadratic.START.copy(), np.zeros(2), [np.zeros(2) for _ in quadratic.XS]
    for row in result.rows:
        changes = []
        for k in row["drawn"]:
            here = w.copy()
            for _ in range(steps):
                here -= lr * (quadratic.gradient(k, here) - g[k] + (alpha + mu) * (here - w))
            g[k] = g[k] - alpha * (here - w)
            changes.append(here - w)
        h = h - alpha / len(quadratic.XS) * sum(changes)
        w = w + sum(changes) / len(changes) - h / alpha
    assert quadratic.weights(result) == pytest.approx(w, abs=1e-6)


def test_feddyn_refuses_incompatible_parts() -> None:
    refused(lambda: FedAvg(FedDyn(), factory=Tiny), ValueError, "weights='uniform'")
    refused(lambda: FedAvg(FedDyn(), SCAFFOLD(), factory=Tiny, weights="uniform"), ValueError, "give one of them")


def wide(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Dropout(), nn.ReLU(), nn.Linear(12, outputs))


def odd(client: int) -> str:
    return "wide" if client % 2 else "tiny"


def consensus(rounds: int = 3, **how: Any) -> Run:
    held = [ClientData(c, images(9, 70 + k)) for k, c in enumerate(federation())]
    method = FedMD(Networks({"tiny": Tiny, "wide": wide}, odd), subset=8, transfer=2, lr=0.01)
    given = {"seed": 4, "evaluate": "drawn", "server_data": {"public": images(20, 3)}, "progress": False}
    return simulate(method, held, rounds=rounds, **{**given, **how})


def test_fedmd_sends_scores_and_the_public_set_once() -> None:
    rows = consensus().rows
    assert [row["failed"] for row in rows] == [{}, {}, {}]
    assert [row["up"] for row in rows] == [{"FedMD.scores": 5 * 8 * 3 * 4}] * 3
    assert "FedMD.public" in rows[0]["down"]
    assert "FedMD.public" not in rows[1]["down"]
    assert rows[2]["accuracy"] == rows[2]["accuracy_personal"]["mean"] > 0.5


def test_fedmd_is_bitwise_equal_with_workers_resumed(tmp_path: Path) -> None:
    whole = consensus(participation=3)
    consensus(rounds=2, participation=3, out=tmp_path / "run")
    again = consensus(participation=3, out=tmp_path / "run", resume=True, workers=3)
    assert_same(whole, again)
    assert [row["accuracy"] for row in whole.rows] == [row["accuracy"] for row in again.rows]
