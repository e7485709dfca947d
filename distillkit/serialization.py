"""Conversion of objects to JSON configs and back, so that a run can be repeated from its record alone.

A config is a JSON value that describes an object. It refers to functions and classes by "module:name". `from_config`
never imports or calls arbitrary code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.configurable import Configurable
from distillkit._utils.files import read_tensors, write_tensors
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.sets import LabeledImages

__all__ = ["ConfigError", "Configurable", "SerializationError", "from_config", "referenced_objects", "to_config"]

_FORMAT = "distillkit.tensors/1"
_MAX_DEPTH = 100
_OWN_PACKAGES = ("distillkit", "fl", "attacks")
_LIBRARIES = ("torch.nn", "torchvision.models")
_SCRIPT_MODULES = ("__main__", "__mp_main__")
"""Names of the started script's module: in its own process, and in spawned processes."""

_FUNCTION_PACKAGES = (
    "torch.nn.functional", "torchvision.models", "distillkit.augment", "distillkit.condense", "distillkit.data",
    "distillkit.generate", "distillkit.losses", "distillkit.networks", "distillkit.select",
)  # fmt: skip
"""Packages whose functions a config may name. They compute, and read images from files."""

_EXCLUDED_MODULES = ("distillkit.condense._state",)
"""Modules of those packages that write files. A config may not name their functions."""

_FORMS: dict[str, tuple[str, ...]] = {
    "tuple": (), "dict": (), "tensor": (), "tensors": (), "set": (), "name": (), "partial": ("args", "with"),
    "object": ("args", "with", "weights", "training"), "float": (), "range": (), "path": (), "dtype": (), "device": (),
}  # fmt: skip
"""Key of each kind of value in a config, with the further keys that it may have."""

_SIMPLE: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, repr, float),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda numbers: range(*numbers)),
    "path": (PurePath, str, Path),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda name: getattr(torch, name)),
    "device": (torch.device, str, torch.device),
}
"""Class of each kind of value without parts, with its conversion to JSON and back."""


_REMEDIES: dict[type, str] = {
    torch.Generator: "pass the seed instead",
    np.ndarray: "pass torch.from_numpy(array)",
    object: "use functools.partial(ConvNet, (3, 32, 32), width=32); or a function, a frozen dataclass or a class "
    "derived from distillkit.serialization.Configurable, at the top level of a module",
}
"""What to pass instead of a value that has no JSON form, by its class."""


class SerializationError(TypeError):
    """Error for a value with a part that has no JSON form. The message names the part, and says what to use instead."""


class ConfigError(ValueError):
    """Error for a config that cannot be rebuilt. The message names the wrong part and the remedy."""


def to_config(
    value: Any, *, store: str | Path | None = None, shared: str | Path | None = None, name: str = "value"
) -> Any:
    """Convert a value to JSON. Objects are described by their class and constructor arguments.

    `from_config` rebuilds the value. The function supports None, numbers, strings, lists, tuples, dictionaries, ranges,
    paths; PyTorch's dtypes, devices and sizes; functions and classes at the top level of a module, and
    `functools.partial` of them; dataclasses; `Configurable` objects (every method, add-on, filter, sampler and network
    of distillkit); and, given a `store`, tensors and sets of images.

    Args:
        value: the value to convert.
        store: folder for tensors and sets. Each file is named after its fingerprint. The folder is created if needed;
            nothing is written unless the whole value can be converted.
        shared: another store that may already contain some of the files. These files are linked instead of written
            again.
        name: name of the value, used in error messages.

    Raises:
        SerializationError: `value` contains an object without a JSON form, such as a lambda, a nested function, an open
            file or a random generator.
    """
    encoder = _Encoder(store is not None)
    config = encoder.encode(value, name)
    if store is not None and encoder.files:
        folder = check.folder(store, "store")
        folder.mkdir(parents=True, exist_ok=True)
        for file, write in encoder.files.items():
            if shared is not None:
                with contextlib.suppress(OSError):  # no such file, or a file system without links
                    os.link(Path(shared) / file, folder / file)
            if not (folder / file).exists():
                write(folder / file)
    return config


def referenced_objects(value: Any) -> dict[str, Any]:
    """Return the functions and classes to which the JSON form of `value` (its config) refers, by "module:name".

    Pass the result to `from_config(config, names=...)` to rebuild a value that uses your own functions and classes.

    Args:
        value: a value that `to_config` can convert.

    Raises:
        SerializationError: `value` contains an object without a JSON form.
    """
    encoder = _Encoder(has_store=True)
    encoder.encode(value, "value")
    return encoder.referenced


def from_config(
    config: Any, *, store: str | Path | None = None, names: Mapping[str, Any] | None = None, trust: Collection[str] = ()
) -> Any:
    """Rebuild the value that `to_config` converted.

    A config cannot make this function import or call arbitrary code. A function or class is accepted if it is in
    `names`, in the script that Python was started with, or in a module listed in `trust`. Networks, component classes
    and pure functions of distillkit, `torch.nn`, `torch.nn.functional` and `torchvision.models` are accepted too. Only
    dataclasses and `Configurable` classes are called.

    Args:
        config: a result of `to_config`, which may have been written to JSON and read again.
        store: folder with the config's tensors and sets.
        names: your functions and classes by "module:name", as the config refers to them: `{"models:small": small}`.
        trust: names of your modules whose functions and classes a config may use: `["models"]`. These modules are
            imported.

    Raises:
        ConfigError: the config has an unknown form, refers to a function or class that is not found or not accepted,
            needs a tensor file that is missing or was changed, or contains arguments that the class does not accept.
    """
    modules = [trust] if isinstance(trust, str) else [*trust] if isinstance(trust, Collection) else trust
    known = check.mapping(names or {}, "names"), check.sequence(modules, "trust", "names of modules")
    return _Decoder(None if store is None else Path(store), *known).decode(config, "config")


class _Encoder:
    """Converter of values to configs, which collects the files to write and the functions and classes in use."""

    def __init__(self, has_store: bool) -> None:
        self.has_store = has_store
        self.files: dict[str, Callable[[Path], Any]] = {}
        self.referenced: dict[str, Any] = {}

    def encode(self, value: Any, at: str, depth: int = 0) -> Any:
        kind = type(value)
        if depth > _MAX_DEPTH:
            raise SerializationError(f"{at[:80]}... contains itself, or is nested deeper than {_MAX_DEPTH} levels")
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if isinstance(value, np.number | np.bool_):
            return self.encode(value.item(), at, depth + 1)
        if kind is list:
            return self._items(value, at, depth)
        if kind in (tuple, torch.Size):
            return {"tuple": self._items(value, at, depth)}
        if kind in (dict, OrderedDict, types.MappingProxyType):
            if value and all(type(k) is str and isinstance(v, Tensor) for k, v in value.items()):
                return {"tensors": self._tensors(dict(value), at)}
            keys = self._items(value, f"the keys of {at}", depth)
            return {"dict": [[k, self.encode(value[n], f"{at}[{n!r}]", depth + 1)] for k, n in zip(keys, value)]}
        for form, (simple, to_json, _) in _SIMPLE.items():
            if isinstance(value, simple):
                return {form: to_json(value)}
        if isinstance(value, LabeledImages):
            return {"set": self._file(set_fingerprint(value), value.save, f"{at} is a set of {len(value)} images")}
        if kind in (Tensor, nn.Parameter):
            return {"tensor": self._tensors({"tensor": value}, at)}
        if _is_importable(value):
            return {"name": self._reference(value)}
        if kind is functools.partial:
            config = {"partial": self.encode(value.func, f"{at}.func", depth + 1)}
            return config | self._arguments(value.args, value.keywords, at, depth)
        if not (_is_importable(kind) and (isinstance(value, Configurable) or _has_plain_fields(kind))):
            remedy = next((text for kind, text in _REMEDIES.items() if isinstance(value, kind)), _REMEDIES[object])
            described = f"a {kind.__qualname__} {getattr(value, '__qualname__', '')}".rstrip()
            raise SerializationError(f"{at} is {described}, which has no JSON form: {remedy}")
        config = {"object": self._reference(kind), **self._arguments(*_constructor_arguments(value), at, depth)}
        if isinstance(value, nn.Module):
            weights = value.state_dict()
            config |= {"weights": self._tensors(weights, at) if weights else None, "training": value.training}
        return config

    def _items(self, values: Collection[Any], at: str, depth: int) -> list[Any]:
        return [self.encode(v, f"{at}[{i}]", depth + 1) for i, v in enumerate(values)]

    def _arguments(self, args: Collection[Any], named: Mapping[str, Any], at: str, depth: int) -> dict[str, Any]:
        options = {k: self.encode(v, f"{at}.{k}", depth + 1) for k, v in named.items()}
        return {k: v for k, v in {"args": self._items(args, f"{at}.args", depth), "with": options}.items() if v}

    def _reference(self, value: Any) -> str:
        path = _path_of(value)
        self.referenced[path] = value
        return path

    def _tensors(self, tensors: dict[str, Tensor], at: str) -> str:
        metadata = {"format": _FORMAT, "order": json.dumps(list(tensors))}
        held = f"{at} has {len(tensors)} tensors"
        return self._file(_fingerprint(tensors), lambda path: write_tensors(path, tensors, metadata), held)

    def _file(self, fingerprint: str, write: Callable[[Path], Any], described: str) -> str:
        if not self.has_store:
            raise SerializationError(f"{described}, which JSON cannot hold: pass store=, a folder for files")
        self.files[f"{fingerprint}.safetensors"] = write
        return fingerprint


class _Decoder:
    """Converter of one config, a JSON value that describes an object, back to the object."""

    def __init__(self, store: Path | None, names: Mapping[str, Any], trust: Collection[str]) -> None:
        self.store, self.names, self.trust = store, names, trust

    def decode(self, config: Any, at: str, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{at[:80]}... is nested deeper than {_MAX_DEPTH} levels")
        if config is None or type(config) in (bool, int, float, str):
            return config
        if type(config) is list:
            return self._items(config, at, depth)
        form = next((form for form in _FORMS if form in config), None) if type(config) is dict else None
        if form is None or not set(config) <= {form, *_FORMS[form]}:
            raise ConfigError(
                f"{at} must be a JSON value, with one of the keys {', '.join(_FORMS)}, got {config!r:.80}: it is "
                "damaged, or from another version of distillkit"
            )
        try:
            return self._built(form, config[form], config, at, depth)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError, RuntimeError, OSError) as error:
            raise ConfigError(f"{at} cannot be rebuilt: {error}") from error

    def _built(self, form: str, value: Any, config: dict[str, Any], at: str, depth: int) -> Any:
        if form in _SIMPLE:
            kind, _, build = _SIMPLE[form]
            return check.instance(build(value), kind, at, f"a {form}")
        if form in ("set", "tensors"):
            return self._stored(form, value, at)
        if form == "tensor":
            return self._stored("tensors", value, at)["tensor"]
        if form in ("tuple", "dict"):
            depth -= form == "dict"  # a pair of key and value is no level
            return {"tuple": tuple, "dict": dict}[form](self._items(value, at, depth))
        called = self.decode(value, at, depth + 1) if form == "partial" else self._found(value, at)
        if form == "name":
            return called
        args = self._items(config.get("args", []), f"{at}.args", depth)
        options = check.mapping(config.get("with", {}), f"{at}.with").items()
        named = {name: self.decode(option, f"{at}.{name}", depth + 1) for name, option in options}
        if form == "partial":
            return functools.partial(called, *args, **named)
        if not _is_constructible(called):
            raise ConfigError(f"{at}: {value} is neither a dataclass nor Configurable, so it is not built")
        if not issubclass(called, nn.Module):
            return called(*args, **named)
        with torch.random.fork_rng(devices=[]):
            network = called(*args, **named)
        if config.get("weights") is not None:
            network.load_state_dict(self._stored("tensors", config["weights"], at), assign=True)
        return network.train(config.get("training", True))

    def _items(self, values: Any, at: str, depth: int) -> list[Any]:
        if type(values) is not list:
            raise ConfigError(f"{at} must hold a list, got {type(values).__name__}")
        return [self.decode(v, f"{at}[{i}]", depth + 1) for i, v in enumerate(values)]

    def _found(self, path: str, at: str) -> Any:
        try:
            return self.names[path] if path in self.names else _find(str(path), self.trust)
        except LookupError as error:
            raise ConfigError(
                f"{at} names {path!r}, which {error}; if you know that it is harmless, pass names={{{path!r}: ...}}, "
                f"or trust=[{str(path).partition(':')[0]!r}] for everything that this module defines"
            ) from error

    def _stored(self, form: str, fingerprint: Any, at: str) -> Any:
        if not re.fullmatch("[0-9a-f]{32}", str(fingerprint)):
            raise ConfigError(f"{at}: a fingerprint must have 32 hex digits, got {fingerprint!r}")
        if self.store is None:
            raise ConfigError(f"{at} needs {fingerprint}.safetensors: pass store=, the folder that `to_config` filled")
        path = self.store / f"{fingerprint}.safetensors"
        if form == "set":
            value: Any = LabeledImages.load(path)
        else:
            tensors, metadata = read_tensors(path, kind=_FORMAT, content="tensors of a config")
            value = {name: tensors[name] for name in json.loads(metadata["order"])}
        if (set_fingerprint if form == "set" else _fingerprint)(value) != fingerprint:
            raise ConfigError(f"{at}: {path} was changed; restore it from a backup")
        return value


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return the fingerprint of a mapping from names to tensors. It depends on the order of the names."""
    return tensor_fingerprint([part for name, tensor in tensors.items() for part in (name, tensor)])


def _has_plain_fields(kind: Any) -> bool:
    """Return whether a class is a dataclass whose constructor takes exactly its fields."""
    names = {f.name for f in fields(kind) if f.init} if is_dataclass(kind) else set()
    return is_dataclass(kind) and {*inspect.signature(kind.__init__).parameters} == {"self", *names}  # type: ignore[misc]


def _constructor_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments that build an object again, with those left at their defaults."""
    own = {f.name: getattr(value, f.name) for f in fields(value) if f.init} if _has_plain_fields(type(value)) else {}
    if not isinstance(value, Configurable):
        return (), own
    args, named = value.init_arguments()
    kind: Any = type(value)
    bound = inspect.signature(kind.__init__).bind(value, *args, **named)
    if own:  # `__post_init__` may have converted the arguments
        return (), own | {name: argument for name, argument in bound.arguments.items() if name in own}
    bound.apply_defaults()
    names, kinds = list(bound.signature.parameters), {p.kind for p in bound.signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        return bound.args[1:], bound.kwargs
    return (), dict(zip(names[1:], bound.args[1:])) | bound.kwargs


def _is_importable(value: Any) -> bool:
    """Return whether `value` is a function, class or named constant that can be found by its module and name."""
    if isinstance(value, types.FunctionType | type) or _is_entry(value):
        return _attribute(sys.modules.get(value.__module__), value.__qualname__) is value
    return False


def _is_entry(value: Any) -> bool:
    """Return whether `value` is a named constant, such as an `Entry` of `fl`: it stores its name in `__qualname__`."""
    own = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
    return not callable(value) and isinstance(own.get("__qualname__"), str)


def _path_of(value: Any) -> str:
    """Return "module:name" of a function or class.

    For distillkit and PyTorch, it is the shortest module that exports the object, so the defining file may move.
    """
    module, name = value.__module__, value.__qualname__
    if module in _SCRIPT_MODULES:
        return f"__main__:{name}"
    parts = module.split(".")
    packages = [sys.modules.get(".".join(parts[:n])) for n in range(1, len(parts))] if _is_known(module) else []
    exporting = (
        p for p in packages if name.split(".")[0] in getattr(p, "__all__", ()) and _attribute(p, name) is value
    )
    return f"{getattr(next(exporting, None), '__name__', module)}:{name}"


def _is_constructible(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Configurable))


def _find(path: str, trust: Collection[str]) -> Any:
    """Return the function, class or named constant with the given "module:name"."""
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise LookupError("does not have the form module:name")
    user = module in (*trust, "__main__")
    if not user and not _in_package(module, *_OWN_PACKAGES, *_LIBRARIES):
        raise LookupError("is outside of this toolkit")
    try:
        found = _attribute(importlib.import_module(module), name)
    except ImportError as error:
        raise LookupError(f"cannot be imported ({error})") from error
    if found is None:
        raise LookupError("does not exist (any more)")
    if user and not (_is_importable(found) and _path_of(found) == path):
        raise LookupError("is not a function or class defined at the top level of that module")
    if not user and not _is_allowed(found):
        raise LookupError("is no network, component class or pure function, so a config may not name it")
    return found


def _is_allowed(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    ours = _in_package(module, *_OWN_PACKAGES)
    if isinstance(value, type):
        network = issubclass(value, nn.Module) and _in_package(module, "torch.nn.modules", "torchvision.models")
        return network or (ours and (issubclass(value, nn.Module) or _is_constructible(value)))
    if isinstance(value, types.FunctionType):
        return _in_package(module, *_FUNCTION_PACKAGES) and module not in _EXCLUDED_MODULES
    return ours and _is_entry(value)


def _is_known(module: str) -> bool:
    return _in_package(module, *_OWN_PACKAGES, "torch", "torchvision")


def _in_package(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _attribute(module: Any, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        return None
