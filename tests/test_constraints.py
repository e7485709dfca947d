"""The committed versions are exact, and fulfil the requirements of the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def test_constraints_fulfil_every_requirement() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    assert len(versions) == len(pinned) > 50
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [Requirement(line) for line in [*project["dependencies"], *extras["dev"], *extras["docs"]]]
    for requirement in (r for r in needed if r.name != "distillkit"):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement
