"""The benchmark of audits does not refute a correct mechanism."""

from __future__ import annotations

import pytest

from tests.scripts import load_script

STEPS = load_script("tests/benchmarks/bench_audit_steps.py")


def test_right_steps_are_not_refuted() -> None:
    for setting in STEPS.SETTINGS:
        first, *mistakes = STEPS.MISTAKES[setting.split(",")[0]]
        assert first == "right"
        assert set(mistakes) <= set(STEPS.PLANTED)
    assert STEPS.audits("condensed set, epsilon 4, rate 1, one release", 1) == {
        "refuted": 0, "law_violated": 0, "audits": 1, "scores": 1024, "stated_epsilon": pytest.approx(4.0),
    }  # fmt: skip
