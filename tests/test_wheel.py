"""The wheel contains the used modules and nothing else, and works alone."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL", "dp-accounting": "dp_accounting", "mkdocs-material": "material"}
"""What a distribution is imported as, where that is not its name."""
OF_MKDOCS = {"markdown", "pygments", "griffe"}
"""What mkdocs, mkdocs-material and mkdocstrings are made of and bring: a hook works on their objects."""
BY_HAND = {"nbclient", "nbformat"}  # imported when notebooks are executed, not when pages are built


def required_modules(requirements: list[str]) -> set[str]:
    """Return the modules of requirements, each of which has a lower bound only."""
    plain = [re.fullmatch(r"([\w-]+)>=[\d.]+", one) for one in requirements]
    assert None not in plain, requirements
    names = [found[1] for found in plain if found]
    return {MODULES.get(name, name) for name in names}


@cache
def imported(*files: Path) -> frozenset[str]:
    """Return the top-level names of all imports in files, without Python's own and the repository's."""
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "find_spec")):
                found |= set(re.findall(r"\bf?'([a-z_]+)", ast.unparse(node.args[0])))
    return frozenset(found - sys.stdlib_module_names - {*PACKAGES, "examples"})


def sources(*folders: str) -> tuple[Path, ...]:
    return tuple(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


EXTRAS = PROJECT["project"]["optional-dependencies"]
"""By name. `docs` is for a checkout: the packages import nothing of it; `dev` is all that tests need."""


def test_imports_equal_requirements() -> None:
    needed = required_modules(PROJECT["project"]["dependencies"])
    optional = required_modules([*EXTRAS["flower"], *EXTRAS["opendp"], *EXTRAS["secure"]])
    used = imported(*sources(*PACKAGES))
    assert {"torch", "sklearn", "PIL", "flwr"} <= used
    assert used - needed - optional == set()
    assert needed - used == set()
    assert optional - used == set()
    assert not needed & optional


def test_site_dependencies_are_in_their_extra() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    hooks = [ROOT / name for name in re.findall(r"docs/scripts/\w+\.py", settings)]
    needed, used = required_modules(EXTRAS["docs"]), imported(*hooks)
    assert len(hooks) >= 4
    own = {path.stem for path in sources("docs/scripts")} | {"tests"}
    assert used - needed - required_modules(PROJECT["project"]["dependencies"]) - OF_MKDOCS - BY_HAND - own == set()
    named = {re.search(r"theme:\n  name: (\w+)", settings)[1]}  # type: ignore[index]
    assert "- mkdocstrings:" in settings
    assert "mike deploy" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert needed - used - named - {"mkdocstrings-python", "mike"} == set()


def test_tests_have_every_extra_except_flowers() -> None:
    assert EXTRAS["dev"][0] == "distillkit[data,docs,opendp,release,secure]"  # Flower has its own: make test-flower
    assert set(EXTRAS) == {"flower", "opendp", "pandas", "data", "secure", "docs", "release", "dev"}


@pytest.mark.slow
def test_wheel_works_alone(tmp_path: Path) -> None:
    """The wheel contains the packages' folders unchanged; here they are copied away from the repository."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / "alone" / package, ignore=shutil.ignore_patterns("__pycache__"))
    own = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE_")}  # these are copies
    environment = {**own, "PYTHONPATH": str(tmp_path / "alone"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(ROOT / "tests" / "smoke.py"), "alone"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, encoding="utf-8"
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^\d{3,} public names are there$", ran.stdout, re.MULTILINE)
    assert "and a set, a federated run, a budget and an attack were made" in ran.stdout
