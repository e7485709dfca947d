from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.scripts import load_script


def test_example_run_and_user_run_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("examples/privacy_report.py")
    [found] = script.main(["--preset", "smoke", "--out", str(tmp_path)])
    assert found.verdict.startswith("This run sends private records")
    run = found.html.parent.parent
    assert found.html == tmp_path / run.name / "report" / "report.html"
    shown = capsys.readouterr().out
    assert found.verdict in shown
    assert "not determined: " in shown
    shutil.rmtree(run / "transcript")
    [again] = script.main(["--preset", "smoke", "--run", str(run)])
    assert again.verdict == "This run sends private records: its images start from real ones."
    assert any("transcript=True" in line for line in again.missing)
    with pytest.raises(SystemExit, match=r"holds no run .*give the out= folder"):
        script.main(["--run", str(tmp_path / "nowhere")])
    capsys.readouterr()
    for words, wanted in (
        (["--run", str(run), "--estimate"], "--estimate has no effect with --run"),
        (["--shadows", "3"], "--shadows must be 0, or even and at least 8, got 3"),
    ):
        with pytest.raises(SystemExit):
            script.main(words)
        assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "said"), [("FedAvg", "inverting the update of client"), ("private", "Claimed: epsilon 8")]
)
def test_other_methods_are_reported_too(method: str, said: str, tmp_path: Path) -> None:
    script = load_script("examples/privacy_report.py")
    [found] = script.main(["--preset", "smoke", "--method", method, "--out", str(tmp_path)])
    lines = [*found.leaks, *found.not_found, found.markdown.read_text(encoding="utf-8")]
    assert any(said in line for line in lines)
    assert "sends private records" not in found.verdict
