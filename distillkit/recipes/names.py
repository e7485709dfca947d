"""Functions and classes by name, and which of them a file may name."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any

from torch import nn

from distillkit._utils.init_recorder import Recorded

__all__ = ["CLOSED", "ROOMS", "builds", "find", "is_named", "path_of", "source_of"]

_OURS = ("distillkit", "fl", "attacks")
_KNOWN = (*_OURS, "torch", "torchvision")
_SCRIPT = ("__main__", "__mp_main__")
"""What the script that was started is called, in its own process and in those that it spawned."""

ROOMS = ("augment", "condense", "data", "generate", "losses", "networks", "select")
"""Rooms of `distillkit` whose functions a file may name: they compute, and read images from files."""

CLOSED = ("distillkit.condense._state",)
"""Modules of those rooms that write files, so that none of their functions may be named."""


def is_named(value: Any) -> bool:
    """Whether `value` is a function, a class or a class's declaration that can be found again by its name."""
    if isinstance(value, types.FunctionType | type) or _is_declaration(value):
        module = sys.modules.get(value.__module__)
        return module is not None and _walk(module, value.__qualname__) is value
    return False


def _is_declaration(value: Any) -> bool:
    """Whether it is an object that says of itself which class's attribute it is (an entry of a message)."""
    return not callable(value) and isinstance(_vars_of(value).get("__qualname__"), str)


def _vars_of(value: Any) -> dict[str, Any]:
    """The attributes that an object itself holds; none for what has no dictionary."""
    return getattr(value, "__dict__", {}) if not isinstance(value, type) else {}


def path_of(value: Any) -> str:
    """`"module:name"`: of ours and of PyTorch the shortest module that has it in public, so that files may be moved.

    Args:
        value: a function, a class or a declaration.
    """
    module, name = value.__module__, value.__qualname__
    if module in _SCRIPT:
        return f"__main__:{name}"
    parts, first = module.split("."), name.split(".")[0]
    for package in [".".join(parts[:n]) for n in range(1, len(parts))] if parts[0] in _KNOWN else []:
        found = sys.modules.get(package)
        if first in getattr(found, "__all__", ()) and _walk(found, name) is value:
            return f"{package}:{name}"
    return f"{module}:{name}"


def source_of(value: Any) -> str | None:
    """A hash of a user's own function or class as it is written; None of ours and PyTorch's, or where it is unknown.

    Args:
        value: a function, a class or a declaration.
    """
    if value.__module__.split(".")[0] in _KNOWN or _is_declaration(value):
        return None
    try:
        text = inspect.getsource(value)
    except (OSError, TypeError):
        return None
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def builds(kind: Any) -> bool:
    """Whether a file may have an object of this class built: a dataclass, or one that says so (`Recorded`).

    Args:
        kind: what should be a class.
    """
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Recorded))


def find(path: str, trust: Collection[str] = ()) -> Any:
    """The function, class or declaration of that name, or why there is none.

    Ours: classes that may be built, networks, and functions of `ROOMS`; of PyTorch: `torch.nn`'s layers and functions
    and `torchvision.models`; of anybody else's: what the started script, or a module in `trust`, defines itself.

    Args:
        path: as `path_of` says it.
        trust: modules that the caller vouches for; they are imported.

    Raises:
        LookupError: saying what is wrong with the name.
    """
    module, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise LookupError("is no name of the form module:name")
    top = module.split(".")[0]
    if module == "__main__":
        found = next((v for m in _SCRIPT if (v := _walk(sys.modules.get(m), name)) is not None), None)
        return _own(found, _SCRIPT, name)
    if module in trust:
        return _own(_walk(_imported(module), name), (module,), name)
    if top in _OURS or _within(module, "torch.nn") or _within(module, "torchvision.models"):
        found = _walk(_imported(module), name)
        if found is None:
            raise LookupError("does not exist (any more)")
        if not _allowed(found):
            raise LookupError("may not be named by a file: it is no network, no component's class, no pure function")
        return found
    raise LookupError("is outside of this toolkit")


def _own(value: Any, modules: Collection[str], name: str) -> Any:
    named = isinstance(value, types.FunctionType | type) or (value is not None and _is_declaration(value))
    if not named or value.__module__ not in modules or value.__qualname__ != name:
        raise LookupError("is not a function or class that is defined there at the top level")
    return value


def _allowed(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    ours = module.split(".")[0] in _OURS
    if isinstance(value, type):
        known = ours or _within(module, "torch.nn.modules") or _within(module, "torchvision.models")
        return known and (issubclass(value, nn.Module) or (ours and builds(value)))
    if _is_declaration(value):
        return ours
    if not isinstance(value, types.FunctionType):
        return False
    if module == "torch.nn.functional" or _within(module, "torchvision.models"):
        return True
    return module not in CLOSED and any(_within(module, f"distillkit.{room}") for room in ROOMS)


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LookupError(f"cannot be imported ({error})") from error


def _walk(module: Any, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        return None
