"""The benchmark of audits: its runs equal those of `train_private`, and injected errors are detected."""

from __future__ import annotations

import pytest
import torch

from distillkit.networks import build
from distillkit.privacy import Account, Ledger, Secret, train_private
from tests.scripts import load_script

BENCH = load_script("tests/benchmarks/bench_audit.py")
STEPS = load_script("tests/benchmarks/bench_audit_steps.py")


@pytest.mark.parametrize("way", ["right, rate 1", "right, rate 0.1"])
@pytest.mark.parametrize("first", [0, 1])
def test_run_equals_a_step_of_train_private(way: str, first: int) -> None:
    """The same seed gives the same batch and the same noise, so the weights agree up to float32."""
    mechanism = BENCH.WAYS[way]
    for seed in range(3):
        secret = Secret(seed)
        secret.generator()  # train_private takes one for dropout
        ours = BENCH.stepped(mechanism, 1, first, secret)[0]
        network = build(BENCH.linear, 0)
        train_private(
            network, BENCH.records()[first:], size=BENCH.OTHERS, sigma=mechanism.sigma, clip=BENCH.CLIP,
            rate=mechanism.rate, steps=1, lr=1.0, ledger=Account(Ledger(), secret=seed), progress=False,
        )  # fmt: skip
        theirs = torch.cat([p.detach().flatten() for p in network.parameters()])
        assert torch.allclose(ours.float(), theirs, rtol=0, atol=1e-6)
        assert float((theirs - BENCH.gradients()[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("way", BENCH.WAYS)
def test_errors_are_detected_without_false_alarms(way: str) -> None:
    """Two audits of 500 runs in each world, with seeds, so that the outcome repeats."""
    found = [BENCH.audit(BENCH.WAYS[way], 500, number, Secret(number)) for number in range(2)]
    assert [f["refuted"] for f in found] == [0 if way.startswith("right") else 1] * 2
    assert all(0 <= f["raw_epsilon"] <= f["ceiling"] for f in found)
    if way == "a class without noise":
        assert not any(f["refuted_one_score"] for f in found)


def test_right_steps_are_not_refuted() -> None:
    for setting in STEPS.SETTINGS:
        first, *mistakes = STEPS.MISTAKES[setting.split(",")[0]]
        assert first == "right"
        assert set(mistakes) <= set(STEPS.PLANTED)
    assert STEPS.audits("condensed set, epsilon 4, rate 1, one release", 1) == {
        "refuted": 0, "law_violated": 0, "audits": 1, "scores": 1024, "stated_epsilon": pytest.approx(4.0),
    }  # fmt: skip
