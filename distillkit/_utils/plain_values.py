"""Values of configs that `distillkit.serialization` wrote, for readers that build no objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain_values(config: Any) -> Any:
    """Return the values of a config as plain JSON, without building objects.

    Tuples become lists, dictionaries have text as keys, and an object is a dictionary of its options, with
    the name of its class as "object". Values that are no config stay as they are.
    """
    if isinstance(config, list):
        return [plain_values(value) for value in config]
    if not isinstance(config, Mapping):
        return config
    if len(config) == 1 and isinstance(config.get("tuple"), list):
        return plain_values(config["tuple"])
    if len(config) == 1 and isinstance(config.get("dict"), list):
        return {str(plain_values(key)): plain_values(value) for key, value in config["dict"]}
    if "object" in config and isinstance(config.get("with"), Mapping):
        config = {key: value for key, value in config.items() if key != "with"} | dict(config["with"])
    return {key: plain_values(value) for key, value in config.items()}
