"""Lazy loading of subpackages, which are imported at their first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from types import ModuleType

__all__ = ["lazy_submodules"]


def lazy_submodules(
    package: str, submodules: Collection[str], names: Collection[str]
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` for a package whose submodules are imported on access (PEP 562).

    Args:
        package: name of the package.
        submodules: names of the package's public submodules.
        names: public names of the package that are not submodules. `__dir__` lists them, too.
    """

    def load(name: str) -> ModuleType:
        if name not in submodules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return load, lambda: sorted([*names, *submodules])
