"""Flower itself, which is not needed for anything but runs on Flower: imported where it is used, or asked for."""

from __future__ import annotations

import importlib
import random
import sys
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
        found = importlib.import_module(f"flwr.{module}")
    except ImportError as error:
        raise MissingFlower(
            f'runs on Flower need flwr 1.41 or later ({error}): pip install "distillkit[flower]"'
        ) from error
    # Its heartbeat's thread draws pauses from Python's global state; the trial of a private network watches that state,
    # and would take them for the network's own draws.
    heartbeat = sys.modules.get("flwr.supercore.heartbeat")
    if getattr(heartbeat, "random", None) is random:
        heartbeat.random = random.Random()  # type: ignore[union-attr]
    return found
