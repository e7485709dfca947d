"""Importing the packages stays cheap: what only some functions need is imported where it is used."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torchvision", "opacus", "kornia", "sklearn", "matplotlib", "lpips", "flwr", "scipy")


def test_importing_the_packages_imports_nothing_heavy() -> None:
    code = f"import sys, distillkit, fl, attacks; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]", out.stdout
