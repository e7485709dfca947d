"""`distillkit doctor`."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version

import click
import torch

from distillkit._utils import check
from distillkit._utils.pages import Section
from distillkit._utils.provenance import VERSION
from distillkit._utils.tables import NONE, Table
from distillkit.commands._results import Result, printed

_VARIABLES = ("DISTILLKIT_DATA", "DISTILLKIT_CACHE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


@click.command(epilog="Example: distillkit doctor --json")
@printed
def doctor(progress: bool) -> Result:
    """Say what is installed, which device is used, and what each extra lacks."""
    facts = {
        "distillkit": VERSION,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }
    facts |= {name: _version(name) or NONE for name in ("torch", "torchvision")}
    device = check.device("auto")
    facts["device of auto"] = f"{device}" + (f", {torch.cuda.get_device_name()}" if device.type == "cuda" else "")
    facts |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    missing = _missing()
    table = Table(["", "found"], [[name, value] for name, value in facts.items()], left=2)
    extras = [[name, ", ".join(absent) or "nothing"] for name, absent in missing.items()]
    lacks = Table(["extra", "lacks"], extras, left=2)
    summary = f"distillkit {VERSION} computes on {device}"
    text = f"{table}\n\n{lacks}\n\nAn extra is installed by: pip install 'distillkit[NAME]'"
    return Result(summary, text, {**facts, "missing": missing}, [Section("Found", [table]), Section("Extras", [lacks])])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _missing() -> dict[str, list[str]]:
    """Return for each extra for users the packages that it needs and that are not installed."""
    found: dict[str, list[str]] = {}
    for line in requires("distillkit") or ():
        match = re.fullmatch(r"([\w.-]+)(?:\[[\w,]*\])?.*extra == ['\"](\w+)['\"]", line)
        if match and match[2] not in ("dev", "docs", "release"):
            absent = found.setdefault(match[2], [])
            absent += [] if _version(match[1]) else [match[1]]
    return found
