"""Lazy loading of subpackages, and of names from them, which are imported at their first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_submodules(
    package: str, submodules: Collection[str], names: Collection[str], sources: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose submodules are imported on access (PEP 562)."""

    def load(name: str) -> Any:
        if name in (sources or {}):
            value = getattr(importlib.import_module((sources or {})[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if name not in submodules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return load, lambda: sorted([*names, *submodules])
