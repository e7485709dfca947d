"""Import of optional packages when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional(module: str, extra: str, what: str) -> Any:
    """Import an optional package for `what`, or raise an ImportError that names the extra of distillkit to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{what} needs {module}: pip install 'distillkit[{extra}]'") from error
