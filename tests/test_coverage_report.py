"""Report and limits of `make coverage`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coverage_report import report_lines


def file(statements: int, lines: int, branches: int, taken: int) -> dict[str, Any]:
    counts = {"num_statements": statements, "covered_lines": lines, "num_branches": branches, "covered_branches": taken}
    return {"summary": counts}


GOOD = {"fl/a.py": file(10, 10, 20, 20), "attacks/a.py": file(1, 1, 0, 0), "distillkit/x/a.py": file(10, 10, 80, 80)}


@pytest.mark.parametrize(("lines", "taken", "good"), [(10, 15, True), (10, 14, False), (8, 20, False)])
def test_package_is_measured_by_branches_and_statements(lines: int, taken: int, good: bool) -> None:
    """Of 100 branches and 20 statements in two files; each has to be at 95 %."""
    found = dict(report_lines({**GOOD, "distillkit/b.py": file(10, lines, 20, taken)}))
    said = f"distillkit: {80 + taken}.0 % of the branches, {(10 + lines) * 5}.0 % of the statements, 2 files"
    assert found.pop(said) is good
    low = {f"  distillkit/b.py: {taken * 5} %, {20 - taken} not taken"} if taken < 18 else set()
    assert {line for line in found if line.startswith(" ")} == low
    assert all(found.values())


def test_unmeasured_package_is_not_fully_covered() -> None:
    with pytest.raises(ValueError, match="nothing of attacks was measured"):
        list(report_lines({path: GOOD[path] for path in ("fl/a.py", "distillkit/x/a.py")}))
