"""Report of branch coverage by package: `python tests/coverage_report.py coverage.json`, as `make coverage` runs it.

Prints a line for each package, and one for each file with less than 90 % of its branches covered. Exits with 1 if less
than 95 % of a package's branches or statements are covered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("distillkit", "fl", "attacks")
FLOOR, LOW = 95.0, 90.0
"""Percent: of a package, and of a file that is named."""


def share(totals: list[Mapping[str, int]], kind: str) -> float:
    """Return the percentage of executed branches ("branches") or statements ("lines") of files; 100 without any."""
    whole = "num_statements" if kind == "lines" else "num_branches"
    count = sum(one[whole] for one in totals)
    return 100 * sum(one[f"covered_{kind}"] for one in totals) / count if count else 100.0


def report_lines(files: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Return the lines to print, each with whether its target is met.

    Args:
        files: coverage.py's, by path.
    """
    for package in PACKAGES:
        own = {path: file["summary"] for path, file in files.items() if Path(path).parts[0] == package}
        if not own:
            raise ValueError(f"nothing of {package} was measured: run from the repository's root")
        lines, branches = (share(list(own.values()), kind) for kind in ("lines", "branches"))
        words = f"{package}: {branches:.1f} % of the branches, {lines:.1f} % of the statements, {len(own)} files"
        yield words, min(lines, branches) >= FLOOR
        for path, summary in sorted(own.items(), key=lambda file: share([file[1]], "branches")):
            if (part := share([summary], "branches")) < LOW:
                missed = summary["num_branches"] - summary["covered_branches"]
                yield f"  {path}: {part:.0f} %, {missed} not taken", True


if __name__ == "__main__":
    report = list(report_lines(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["files"]))
    print("\n".join(line for line, _ in report))
    sys.exit(0 if all(good for _, good in report) else f"a package is below {FLOOR:.0f} %")
