"""Flower itself, which is not needed for anything but runs on Flower: imported where it is used, or asked for."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["MissingFlower", "flower"]


class MissingFlower(ImportError):
    """Flower is not installed here; the message says how to get it."""


def flower(module: str) -> Any:
    """One of Flower's public modules.

    Args:
        module: "app", "clientapp" or "serverapp".

    Raises:
        MissingFlower: it cannot be imported.
    """
    try:
        return importlib.import_module(f"flwr.{module}")
    except ImportError as error:
        raise MissingFlower(
            f'runs on Flower need flwr 1.41 or later ({error}): pip install "distillkit[flower]"'
        ) from error
