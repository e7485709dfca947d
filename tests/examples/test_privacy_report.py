from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import load_script


def test_a_run_is_made_and_reported_and_one_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("examples/privacy_report.py")
    [found] = script.main(["--preset", "smoke", "--out", str(tmp_path)])
    assert found.verdict.startswith("This run sends private records")
    assert found.html == tmp_path / "0" / "report" / "report.html"
    shown = capsys.readouterr().out
    assert found.verdict in shown
    assert "not told: " in shown
    [again] = script.main(["--run", str(tmp_path / "0")])
    assert again.verdict.startswith("This run sends private records")
    with pytest.raises(SystemExit, match="holds no run"):
        script.main(["--run", str(tmp_path / "nowhere")])
