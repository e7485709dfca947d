"""The report compares messages with ledger charges, and a claim with outcomes of fresh runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks import report
from attacks.audit import audit_noise
from attacks.membership import Pipeline
from attacks.reporting import Audit
from distillkit.data import clients, load
from distillkit.networks import ConvNet
from distillkit.privacy import gaussian_delta, gaussian_sigma
from distillkit.rng import derive
from fl import ClientDP, FedAvg, Filtered, RunFolder, simulate
from fl.engine.store import Store
from fl.message import Message

DIGITS = load("digits", size=8)
TRAIN = DIGITS.train[:60]
OWNERS = [torch.arange(30), torch.arange(30, 60)]
SIGMA = gaussian_sigma(4.0, 1e-5)
PROFILE = [(e, gaussian_delta(SIGMA, e)) for e in (0.0, 0.5, 1.0, 2.0, 4.0)]


def outcomes(sigma: float) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.randn(2, 500, generator=derive(0), dtype=torch.float64) * sigma
    return 1 + noise[0], noise[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    average = FedAvg(factory=lambda outputs: ConvNet((1, 8, 8), outputs, width=4, depth=1), weights="uniform")
    method = Filtered(average, ClientDP(sigma=SIGMA, rate=1.0, clip=0.5))
    simulate(method, clients(TRAIN, OWNERS), rounds=2, seed=0, out=RunFolder(out, transcript=True), progress=False)
    return out


def test_every_reply_is_compared_with_the_ledger(run: Path, tmp_path: Path) -> None:
    text = report(run, out=tmp_path / "paid").markdown.read_text(encoding="utf-8")
    assert (
        "Each of 2 clients was charged for at least as many releases as it sent replies (the smallest surplus is 0)"
        in text
    )
    short = Path(shutil.copytree(run, tmp_path / "short"))
    lines = (short / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    charges = [line for line in lines if '"event"' in line]
    assert len(charges) == 2
    (short / "ledger.jsonl").write_text(
        "\n".join(line for line in lines if line != charges[1]) + "\n", encoding="utf-8"
    )
    found = report(short)
    assert "its ledger is incomplete: client 0 sent 2 replies and was charged for 1 releases" in found.verdict
    assert "(2 clients in total have such replies)" in found.markdown.read_text(encoding="utf-8")


def test_exchanges_other_than_training_need_no_charge(run: Path, tmp_path: Path) -> None:
    """For example keys and signatures."""
    store = Store(Path(shutil.copytree(run, tmp_path / "run")))
    for client in range(2):
        store.record(1, client, "up", Message.unchecked({"Keys.public": torch.ones(4)}), "announce")
    found = report(store.out)
    assert not any("ledger is incomplete" in line for line in found.leaks)
    assert "as it sent replies (the smallest surplus is 0)" in found.markdown.read_text(encoding="utf-8")


def test_false_claim_is_the_verdict(run: Path, tmp_path: Path) -> None:
    found = report(run, audit=Audit(*outcomes(SIGMA / 2), PROFILE, of="one round"), out=tmp_path)
    assert found.verdict.startswith("This run leaks: the claimed epsilon ")
    assert "of one round is refuted at 99 %" in found.verdict
    text = found.markdown.read_text(encoding="utf-8")
    assert "500 runs of one round with a record and 500 without" in text
    assert "claimed is at most 4" in text


def test_true_claim_is_neither_refuted_nor_confirmed(run: Path, tmp_path: Path) -> None:
    found = report(run, audit=Audit(*outcomes(SIGMA), PROFILE), out=tmp_path)
    assert found.verdict.startswith("No leak found at this resolution: the claimed epsilon ")
    assert "of the run is not refuted at 99 %" in found.verdict
    own = json.loads((run / "history.jsonl").read_text(encoding="utf-8").splitlines()[-1])["privacy"]["epsilon"]
    assert any(
        f"whether the run's own epsilon {own:.4g} holds" in line for line in found.missing
    )  # two rounds, not one
    whole = [*PROFILE, (own, 1e-5)]
    again = report(run, audit=Audit(*outcomes(SIGMA), whole), out=tmp_path)
    assert not any("own epsilon" in line for line in again.missing)


def test_noise_draws_are_compared_with_the_charges(run: Path, tmp_path: Path) -> None:
    counted = audit_noise({SIGMA: 90}, [(SIGMA, 100)])
    found = report(run, audit=Audit(noise=counted, of="one round"), out=tmp_path)
    assert found.verdict == f"This run leaks: the noise of one round differs from what was charged: {counted}."
    assert "10 noise values" in found.verdict
    assert any("give outcomes to Audit" in line for line in found.missing)
    whole = report(run, audit=Audit(noise=audit_noise({SIGMA: 100}, [(SIGMA, 100)])), out=tmp_path)
    assert whole.not_found == ()
    assert "drawn compared with charged: as much noise was drawn as was charged." in whole.markdown.read_text(
        encoding="utf-8"
    )


def test_report_without_an_audit_names_what_is_unknown(run: Path, tmp_path: Path) -> None:
    found = report(run, out=tmp_path)
    assert any(line.startswith("whether the claimed epsilon holds: give audit=Audit(") for line in found.missing)
    assert "The claim was not audited." in found.markdown.read_text(encoding="utf-8")


def test_baselines_are_shown_beside_the_run(run: Path, tmp_path: Path) -> None:
    def pipeline(strength: float, labels: torch.Tensor = TRAIN.labels) -> Pipeline:
        def fit(indices: torch.Tensor, seed: int) -> dict[str, Any]:
            noise = torch.randn(len(TRAIN), generator=derive(seed)).double()
            return {"model": lambda x, y: strength * torch.isin(torch.arange(len(x)), indices) + noise[: len(x)]}

        return Pipeline(fit, TRAIN.images, labels)

    raw = {"model on raw data": pipeline(9.0)}
    found = report(run, pipeline(0.0), baselines=raw, out=tmp_path, progress=False)
    rows = [line for line in found.markdown.read_text(encoding="utf-8").splitlines() if "| LiRA offline |" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| this run", "| model on raw data"]
    areas = [float(row.split(" | ")[3].split()[0]) for row in rows]
    assert areas[1] > 0.95 > 0.7 > areas[0]
    assert not any("separates members from non-members" in line for line in found.leaks)
    alone = report(run, pipeline(0.0), out=tmp_path, progress=False)
    assert any("give baselines=" in line for line in alone.missing)
    with pytest.raises(ValueError, match=r"baselines are compared with the run's own pipeline: give pipeline= too"):
        report(run, baselines=raw, out=tmp_path)
    with pytest.raises(TypeError, match="baselines must map names to Pipelines, got 'a': int"):
        report(run, pipeline(0.0), baselines={"a": 3}, out=tmp_path)  # type: ignore[dict-item]
    other = {"raw": pipeline(0.0, TRAIN.labels.flip(0))}
    with pytest.raises(ValueError, match=r"baselines\['raw'\] must be on the pipeline's records in the same order"):
        report(run, pipeline(0.0), baselines=other, out=tmp_path)


def test_invalid_audits_are_refused_first(run: Path, tmp_path: Path) -> None:
    inside, outside = outcomes(SIGMA)
    with pytest.raises(TypeError, match=r"audit must be of attacks.reporting.*Audit, got tuple"):
        report(run, audit=(inside, outside), out=tmp_path)  # type: ignore[arg-type]
    for odd, error, match in [
        ((inside, outside, []), ValueError, "claim must hold at least one"),
        ((inside, outside, 4.0), TypeError, "claim must be a list of pairs"),
        ((inside.long(), outside, PROFILE), TypeError, "inside must be a floating tensor"),
        ((inside[:1], outside, PROFILE), ValueError, "inside must be"),
    ]:
        with pytest.raises(error, match=match):
            Audit(*odd)  # type: ignore[arg-type]
    for half in (Audit, lambda: Audit(inside), lambda: Audit(outside=outside, claim=PROFILE)):
        with pytest.raises(ValueError, match="inside and outside must both be given"):
            half()
    with pytest.raises(TypeError, match="noise must be the result of audit_noise, got int"):
        Audit(noise=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="confidence must be"):
        Audit(inside, outside, PROFILE, confidence=1.0)
    with pytest.raises(TypeError, match="of must describe"):
        Audit(inside, outside, PROFILE, of=3)  # type: ignore[arg-type]
