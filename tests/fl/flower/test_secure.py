"""Secure sums over an in-memory grid: results equal to threads, and nodes that drop out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl import FedAvg, Filtered, Keyring, Method, NoUsableReply, SecureSums
from fl.addons import SCAFFOLD
from fl.deploy.flower import IncompatibleNode
from tests.fl.flower.test_node_ledger import METHODS as PRIVATE
from tests.fl.flower.test_policy import written
from tests.fl.flower.test_runs import FAST, assert_equal, grid, run_in_threads, run_on_grid

BOUNDS: dict[Any, float] = {FedAvg.update: 8.0, SCAFFOLD.drift: 100.0}


def sealed(ring: Keyring, *, node: bool, **options: Any) -> Method:
    """Return the method of a node, or that of the server, without a keyring."""
    given = {"threshold": 2, "bounds": BOUNDS, "keyring": ring if node else None, **options}
    return Filtered(FedAvg(SCAFFOLD(), **FAST), SecureSums(ring.registry(5), **given))


def test_secure_sums_equal_threads_without_keys_on_the_server(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "rings")
    there = grid(sealed(ring, node=True), tmp_path / "nodes")
    run = run_on_grid(there, sealed(ring, node=False), evaluate="all")
    assert_equal(run, run_in_threads(sealed(ring, node=True), evaluate="all"))


def test_node_that_drops_out_after_masking_is_recovered(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "rings")
    lost = {101}

    def fault(node: int, kind: str, group: str) -> str | None:
        return "error" if kind == "train.job" and node in lost and group == "2" else None

    how: dict[str, Any] = {"participation": 1.0, "rounds": 2, "evaluate": "none"}
    method = {"threshold": 4}
    there = grid(sealed(ring, node=True, **method), tmp_path / "nodes", fault)
    run = run_on_grid(there, sealed(ring, node=False, **method), **how)
    assert [row["secure_sum"] for row in run.rows] == [{"clients": 5, "recovered": 0}, {"clients": 4, "recovered": 1}]
    assert list(run.rows[1]["failed"]) == ["1"]
    lost.add(103)
    there = grid(sealed(ring, node=True, **method), tmp_path / "others", fault)
    with pytest.raises(NoUsableReply, match=r"after 'local' 3 clients are left, fewer than threshold=4.*\[1, 3\]"):
        run_on_grid(there, sealed(ring, node=False, **method), **how)


def test_node_with_another_registry_or_threshold_is_refused(tmp_path: Path) -> None:
    ring, other = Keyring(tmp_path / "rings"), Keyring(tmp_path / "others")
    for theirs in (sealed(other, node=True), sealed(ring, node=True, threshold=3)):
        with pytest.raises(IncompatibleNode, match="another method than the server"):
            run_on_grid(grid(theirs, tmp_path / "nodes"), sealed(ring, node=False))


def test_secure_sums_of_noised_updates_are_charged_once_a_round(tmp_path: Path) -> None:
    ring, inner = Keyring(tmp_path / "keys"), PRIVATE["DPSGD"]
    server, node = (
        Filtered(inner(), SecureSums(ring.registry(5), keyring=own, threshold=3, bounds={FedAvg.update: 4.0}))
        for own in (None, ring)
    )
    how: dict[str, Any] = {"rounds": 1, "participation": 1.0, "evaluate": None}
    policy = written(tmp_path / "policy.toml", methods='["Filtered(FedAvg(DPSGD), SecureSums)"]')
    far = run_on_grid(grid(node, tmp_path / "nodes", policy=policy), server, **how)
    assert far.rows[0]["failed"] == {}
    assert far.rows[0]["privacy"] == run_in_threads(inner(), **how).rows[0]["privacy"]
