"""The report compares messages with ledger charges, and a claim with outcomes of fresh runs."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

import pytest
import torch

from attacks import report
from attacks.audit import audit_noise
from attacks.reporting import Audit
from distillkit.data import clients, load
from distillkit.networks import ConvNet
from distillkit.privacy import gaussian_delta, gaussian_sigma
from distillkit.rng import derive
from fl import ClientDP, FedAvg, Filtered, RunFolder, simulate
from tests.refused import refused

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


def test_cut_or_edited_ledger_is_the_verdict(run: Path, tmp_path: Path) -> None:
    whole = (run / "ledger.jsonl").read_bytes()
    cut, edited = b"".join(whole.splitlines(keepends=True)[:3]), whole.replace(b'"count": 1', b'"count": 2', 1)
    for name, data in {"cut": cut, "edited": edited}.items():
        path = Path(shutil.copytree(run, tmp_path / name)) / "ledger.jsonl"
        path.write_bytes(data)
        found = report(path.parent)
        [said] = re.findall("nothing supports its claim, because its ledger is not intact: (.*)[.]", found.verdict)
        assert str(path) in said
        assert f"The ledger is not intact: {said}." in html.unescape(found.html.read_text(encoding="utf-8"))


def test_a_false_claim_is_the_verdict_and_a_true_one_is_not(run: Path, tmp_path: Path) -> None:
    for sigma, start in ((SIGMA / 2, "This run leaks: "), (SIGMA, "No leak found at this resolution: ")):
        found = report(run, audit=Audit(*outcomes(sigma), PROFILE, mechanism="one round"), out=tmp_path)
        assert found.verdict.startswith(f"{start}the claimed epsilon ")


def test_invalid_audits_are_refused_first(run: Path, tmp_path: Path) -> None:
    inside, outside = outcomes(SIGMA)
    with pytest.raises(TypeError, match=r"audit must be of attacks.reporting.Audit, got tuple"):
        report(run, audit=(), out=tmp_path)  # type: ignore[arg-type]
    refused(lambda: Audit(inside, outside, []), ValueError, "claim must hold at least one")
    counted = audit_noise({}, [])
    for half in (Audit, lambda: Audit(inside), lambda: Audit(outside=outside, claim=PROFILE, noise=counted)):
        refused(half, ValueError, "inside and outside must both be given")
    refused(lambda: Audit(noise=3), TypeError, "noise must be the result of audit_noise, got int")
    refused(lambda: Audit(inside, outside, PROFILE, confidence=1.0), ValueError, "confidence must be")
    for odd in (3, " "):
        refused(lambda odd=odd: Audit(inside, outside, PROFILE, mechanism=odd), TypeError, "mechanism must describe")  # type: ignore[misc]
