"""The code of docs/flower.md runs in order, and its tables match the messages of nodes and the records."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from distillkit.data import Split
from distillkit.privacy import Event, Ledger
from distillkit.privacy._child_ledger import child_state
from fl import Method
from fl.deploy.flower import Policy, app_hash, read_policy
from fl.deploy.flower._node_ledger import NodeLedger
from fl.deploy.flower._policy import PolicyRefusal
from tests.fl.federations import Tiny, images
from tests.fl.flower import fake_flower
from tests.fl.flower.test_client_loading import pictures
from tests.fl.flower.test_runs import client_data

PAGE = Path(__file__).parents[3] / "docs" / "flower.md"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the page's code in a temporary folder and return its names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_app").mkdir()
    (tmp_path / "my_app" / "client_app.py").write_text("", encoding="utf-8")
    for partition in ("0", "1"):
        pictures(tmp_path / "pictures" / partition)
    text = PAGE.read_text(encoding="utf-8")
    (policy,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "policy.toml").write_text(policy, encoding="utf-8")
    names: dict[str, Any] = {
        "network": Tiny, "test_set": images(10, seed=9), "images_of": lambda k: client_data(k).train,
        "test_images_of": lambda k: client_data(k).test,
    }  # fmt: skip
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block.replace("/var/lib/distillkit", str(tmp_path / "nodes")), names)
    return names


def test_private_run_of_the_page_passes_its_policy(told: dict[str, Any]) -> None:
    assert isinstance(told["load_client"](0), Split)
    nodes = {100 + k: fake_flower.context(100 + k, k, 2) for k in range(2)}
    told["app"](fake_flower.Grid(told["node"], nodes), fake_flower.context(0, None, 0))
    history = Path("runs/private/history.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(history) == 2
    assert all('"failed": {}' in row for row in history)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "smallest_sigma": ({"smallest_sigma": 4.0}, "local"), "largest_rate": ({"largest_rate": 0.25}, "local"),
    "methods": ({"methods": ("PrivateFedDM",)}, "local"), "app": ({"app": "sha256:" + 64 * "0"}, "local"),
    "evaluation": ({}, "evaluate"), "epsilon": ({}, "local"),
}  # fmt: skip
"""First key of a table row -> the policy change that refuses the page's private run, and the refused verb."""


def test_table_of_refusals_matches_the_messages(told: dict[str, Any], tmp_path: Path) -> None:
    rows = {row[0][0]: row for row in table()}
    assert sorted(key for keys, _ in rows.values() for key in keys) == sorted(f.name for f in fields(Policy))
    assert rows.keys() == REFUSED.keys()
    for key, (changes, verb) in REFUSED.items():
        policy = replace(read_policy("policy.toml"), **changes)
        ledger = NodeLedger(tmp_path / key, 1, "data", policy)
        with pytest.raises(PolicyRefusal) as caught:
            asked(told["private"], verb, policy, ledger)
        said = re.escape(rows[key][1]).replace(re.escape("..."), ".*")
        assert re.match(said, str(caught.value)), key


def asked(method: Method, verb: str, policy: Policy, ledger: NodeLedger) -> None:
    policy.require_request(method, verb, app_hash("my_app"))
    ledger.branch(child_state(Ledger(None), 1)).spend(Event("dp_sgd", 2.0, 0.5, 10_000, client=1))


def table() -> list[tuple[list[str], str]]:
    """Return the rows of the page's table of refusals: keys and message."""
    body = PAGE.read_text(encoding="utf-8").split('after "refused:" |')[1].split("\n\n")[0]
    return [(re.findall(r"`(\w+)`", keys), said) for keys, said in re.findall(r"^\| (`.*?) \| (.*?) \|$", body, re.M)]


def test_hashes_on_flower_equal_those_of_threads() -> None:
    record = json.loads((PAGE.parent / "results" / "flower.json").read_text(encoding="utf-8"))
    assert [len(record[part]["rows"]) for part in ("simulated", "deployed")] == [7, 2]
    for row in (*record["simulated"]["rows"], *record["deployed"]["rows"]):
        assert row["hash_threads"] == row["hash_flower"]
