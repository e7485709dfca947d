"""Noised updates in secure sums over an in-memory grid with a policy: charged as in process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl import FedAvg, Filtered, Keyring, Registry, SecureSums
from fl.deploy.flower import client_app
from tests.fl.flower import fake_flower
from tests.fl.flower.test_node_ledger import METHODS as PRIVATE
from tests.fl.flower.test_policy import written
from tests.fl.flower.test_runs import client_data, run_in_threads, run_on_grid


def secure(inner: FedAvg, registry: Registry, ring: Keyring | None) -> Filtered:
    return Filtered(inner, SecureSums(registry, keyring=ring, threshold=3, bounds={FedAvg.update: 4.0}))


def test_secure_sums_of_noised_updates_are_charged_once_a_round(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys")
    registry = ring.registry(5)
    inner: Any = PRIVATE["DPSGD"]
    how: dict[str, Any] = {"rounds": 1, "participation": 1.0, "evaluate": None}
    policy = written(tmp_path / "policy.toml", methods='["Filtered(FedAvg(DPSGD), SecureSums)"]')
    app = client_app(secure(inner(), registry, ring), client_data, folder=tmp_path / "nodes", policy=policy)
    there = fake_flower.Grid(app, {100 + k: fake_flower.context(100 + k, k, 5) for k in range(5)})
    far = run_on_grid(there, secure(inner(), registry, None), **how)
    assert far.rows[0]["failed"] == {}
    assert far.rows[0]["privacy"] == run_in_threads(inner(), **how).rows[0]["privacy"]
