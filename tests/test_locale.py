"""The tests that read and write files pass under the locale "C", whose encoding is ASCII."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    "tests/distillkit/data/test_folder_and_npz.py",
    "tests/distillkit/privacy/test_ledger.py",
    "tests/distillkit/study/test_records.py",
    "tests/distillkit/test_files.py",
    "tests/distillkit/test_locking.py",
    "tests/distillkit/test_serialization.py",
    "tests/attacks/test_reporting.py",
    "tests/fl/flower/test_policy.py",
    "tests/fl/test_repeat.py",
    "tests/fl/test_run_locking.py",
    "tests/test_docs.py",
    "tests/test_docstrings.py",
]


@pytest.mark.slow
def test_files_are_read_and_written_under_the_locale_c() -> None:
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False, encoding="utf-8")
    assert done.returncode == 0, done.stdout[-4000:]
