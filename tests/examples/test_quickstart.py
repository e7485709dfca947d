"""The demo runs as a user runs it, and does not run twice what is finished."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def demo(out: Path, *more: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--preset", "smoke", "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=out.parent).stdout


def test_the_demo_prints_its_table_and_writes_records_and_pictures(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = demo(out, "--workers", "2")
    lines = json.loads((out / "summary.json").read_text())
    assert {(x["split"], x["method"]) for x in lines} == {
        (s, m) for s in ("Dirichlet 0.1", "Dirichlet 0.01") for m in ("FedAvg", "FedProx", "FedDM", "Real")
    }
    for line in lines:
        rows = [json.loads(x) for x in (out / line["run"] / "history.jsonl").read_text().splitlines()]
        assert line["accuracy_last"] == rows[-1]["accuracy"]
        assert line["bytes_up"] == sum(r["bytes_up"] for r in rows)
        assert line["epsilon"] is None
        assert f"{100 * line['accuracy_last']:.1f}" in said
    assert "Local epochs a round: FedAvg 1, FedProx 1." in said
    for name in ("accuracy_by_round", "accuracy_by_bytes_up", "accuracy_by_client_seconds", "synthetic_digits"):
        assert (out / f"{name}.png").stat().st_size > 5000
    before = (out / "summary.json").read_text()
    assert "Written to" in demo(out)
    assert (out / "summary.json").read_text() == before


def test_the_demo_says_that_fedavg_and_fedprox_differ_in_local_epochs() -> None:
    place = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    presets = place["PRESETS"]
    for preset in (presets["cpu"], presets["paper"]):
        epochs = [place["method"](name, preset).phases[0].epochs for name in ("FedAvg", "FedProx")]
        assert epochs == [1, 5]
        assert place["closing"](preset).startswith("Local epochs a round: FedAvg 1, FedProx 5. ")
    readme = (ROOT / "README.md").read_text()
    assert "1 local epoch a round, FedProx 5" in readme
