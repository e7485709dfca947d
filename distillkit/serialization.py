"""Conversion of objects to JSON configs and back, so that a run can be repeated from its record alone.

A config is a JSON value that describes an object. It refers to functions and classes by "module:name". `from_config`
never imports or calls arbitrary code.
"""

from __future__ import annotations

import functools
import hashlib
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
from dataclasses import Field, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.configurable import Configurable
from distillkit._utils.files import read_tensors, write_tensors
from distillkit._utils.user_warnings import warn
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.sets import LabeledImages

__all__ = ["ConfigError", "Configurable", "SerializationError", "from_config", "referenced_objects", "to_config"]

_FORMAT = "distillkit.tensors/1"
_MAX_DEPTH = 100
_OWN_PACKAGES = ("distillkit", "fl", "attacks")
_KNOWN_PACKAGES = (*_OWN_PACKAGES, "torch", "torchvision")
_SCRIPT_MODULES = ("__main__", "__mp_main__")
"""Names of the started script's module: in its own process, and in spawned processes."""

_FUNCTION_PACKAGES = ("augment", "condense", "data", "generate", "losses", "networks", "select")
"""Packages of `distillkit` whose functions a config may name. They compute, and read images from files."""

_EXCLUDED_MODULES = ("distillkit.condense._state",)
"""Modules of those packages that write files. A config may not name their functions."""


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
            if not (folder / file).exists() and not _linked(shared, folder, file):
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

    Warns:
        UserWarning: the source code of one of your functions or classes has changed since the config was written.
    """
    return _Decoder(
        None if store is None else Path(store),
        check.mapping(names or {}, "names"),
        check.sequence(list(trust), "trust", "names of modules") if not isinstance(trust, str) else (trust,),
    ).decode(config, "config", 0)


class _Encoder:
    """Converter of one value to a config, its JSON form.

    It also collects the files to write, and the functions and classes that the value uses.
    """

    def __init__(self, has_store: bool) -> None:
        self.has_store = has_store
        self.files: dict[str, Callable[[Path], Any]] = {}
        self.referenced: dict[str, Any] = {}
        self.parents: list[Any] = []

    def encode(self, value: Any, at: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float or isinstance(value, np.number | np.bool_):
            number = value if kind is float else value.item()
            return {"float": repr(number)} if isinstance(number, float) and not math.isfinite(number) else number
        if any(value is parent for parent in self.parents):
            raise SerializationError(f"{at} contains itself, which has no JSON form")
        self.parents.append(value)
        try:
            return self._compound(value, at)
        finally:
            self.parents.pop()

    def _compound(self, value: Any, at: str) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, at)
        if kind in (torch.Size, tuple):
            return {"tuple" if kind is tuple else "size": self._items(value, at)}
        if kind in (dict, OrderedDict, types.MappingProxyType):
            if value and all(type(k) is str and isinstance(v, Tensor) for k, v in value.items()):
                self._require_store(at, f"{len(value)} named tensors")
                return {"tensors": self._add_tensors(dict(value))}
            pairs = [[self.encode(k, f"a key of {at}"), self.encode(v, f"{at}[{k!r}]")] for k, v in value.items()]
            return {"dict": pairs}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        if isinstance(value, torch.dtype | torch.device):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, LabeledImages):
            self._require_store(at, f"a set of {len(value)} images")
            fingerprint = set_fingerprint(value)
            self.files[f"{fingerprint}.safetensors"] = value.save
            return {"set": fingerprint}
        if kind in (Tensor, nn.Parameter):
            self._require_store(at, f"a tensor of shape {list(value.shape)}")
            return {"tensor": self._add_tensors({"tensor": value})}
        if _is_importable(value):
            return {"name": self._reference(value), **_source(value)}
        if kind is functools.partial:
            args = {"args": self._items(value.args, f"{at}.args")} if value.args else {}
            options = {k: self.encode(v, f"{at}.{k}") for k, v in value.keywords.items()}
            return {"partial": self.encode(value.func, f"{at}.func"), **args, **({"with": options} if options else {})}
        return self._instance(value, at)

    def _items(self, values: Collection[Any], at: str) -> list[Any]:
        return [self.encode(v, f"{at}[{i}]") for i, v in enumerate(values)]

    def _instance(self, value: Any, at: str) -> Any:
        kind = type(value)
        unsupported = SerializationError(f"{at} is {_described(value)}, which has no JSON form: {_remedy(value)}")
        if not _is_importable(kind):
            raise unsupported
        config: dict[str, Any] = {"object": self._reference(kind), **_source(kind)}
        init = next((base for base in kind.__mro__ if "__init__" in vars(base)), object)
        if is_dataclass(kind) and "__dataclass_params__" in vars(init):
            options = {f.name: getattr(value, f.name) for f in fields(kind) if f.init and not _is_new_default(value, f)}
            signature = inspect.signature(kind)
            if isinstance(value, Configurable):  # `__post_init__` may have converted the arguments
                args, named = value.init_arguments()
                options |= signature.bind_partial(*args, **named).arguments
            if set(signature.parameters) <= {f.name for f in fields(kind) if f.init}:  # no `InitVar`
                return config | {"with": {k: self.encode(v, f"{at}.{k}") for k, v in options.items()}}
        if not isinstance(value, Configurable):
            raise unsupported
        config |= self._arguments(value, kind, at)
        if isinstance(value, nn.Module):
            self._require_store(at, f"{_described(value)} with its weights")
            config["weights"] = self._add_tensors(value.state_dict()) if value.state_dict() else None
            config["training"] = value.training
        return config

    def _arguments(self, value: Configurable, kind: type, at: str) -> dict[str, Any]:
        args, named = value.init_arguments()
        bound = inspect.signature(kind.__init__).bind(value, *args, **named)  # type: ignore[misc]
        passed = set(bound.arguments)
        bound.apply_defaults()
        by_position, by_name = list[Any](), dict[str, Any]()
        parameters = list(bound.signature.parameters.values())[1:]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        for p in parameters:
            argument = bound.arguments[p.name]
            if p.kind is p.VAR_POSITIONAL:
                by_position += self._items(argument, f"{at}.{p.name}")
            elif p.kind is p.VAR_KEYWORD:
                by_name |= {k: self.encode(v, f"{at}.{k}") for k, v in argument.items()}
            elif p.kind is p.POSITIONAL_ONLY or (variadic and p.kind is p.POSITIONAL_OR_KEYWORD):
                by_position.append(self.encode(argument, f"{at}.{p.name}"))
            else:
                try:
                    by_name[p.name] = self.encode(argument, f"{at}.{p.name}")
                except SerializationError:
                    if p.name in passed:  # a default may be left out
                        raise
        return {k: v for k, v in (("args", by_position), ("with", by_name)) if v}

    def _add_tensors(self, tensors: dict[str, Tensor]) -> str:
        fingerprint = _fingerprint(tensors)
        metadata = {"format": _FORMAT, "order": json.dumps(list(tensors))}
        self.files[f"{fingerprint}.safetensors"] = lambda path: write_tensors(path, tensors, metadata)
        return fingerprint

    def _reference(self, value: Any) -> str:
        path = _path_of(value)
        self.referenced[path] = value
        return path

    def _require_store(self, at: str, description: str) -> None:
        if not self.has_store:
            raise SerializationError(f"{at} is {description}, which JSON cannot hold: pass store=, a folder for files")


class _Decoder:
    """Converter of one config, a JSON value that describes an object, back to the object."""

    def __init__(self, store: Path | None, names: Mapping[str, Any], trust: Collection[str]) -> None:
        self.store, self.names, self.trust = store, names, trust

    def decode(self, config: Any, at: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{at[:80]}... is nested deeper than {_MAX_DEPTH} levels")
        if config is None or type(config) in (bool, int, float, str):
            return config
        if type(config) is list:
            return self._items(config, at, depth)
        if type(config) is not dict:
            raise ConfigError(f"{at} is a {type(config).__name__}, which is not JSON")
        kinds = [kind for kind in _KINDS if kind in config]
        if len(kinds) != 1:
            raise ConfigError(
                f"{at} must have exactly one of the keys {', '.join(_KINDS)}; got "
                f"{', '.join(map(repr, config)) or 'none'}. It is damaged, or from another version of distillkit"
            )
        extra = [key for key in config if key not in (kinds[0], *_KINDS[kinds[0]][0])]
        if extra:
            raise ConfigError(f"{at} has the key {extra[0]!r}, which this version of distillkit does not know")
        try:
            return _KINDS[kinds[0]][1](self, config, at, depth + 1)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError, RuntimeError, OSError) as error:
            raise ConfigError(f"{at} cannot be rebuilt: {error}") from error

    def _items(self, values: Any, at: str, depth: int) -> list[Any]:
        return [self.decode(v, f"{at}[{i}]", depth + 1) for i, v in enumerate(_typed(list, values, at))]

    def _float(self, config: dict[str, Any], at: str, depth: int) -> float:
        check.one_of(config["float"], at, ("nan", "inf", "-inf"))
        return float(config["float"])

    def _dict(self, config: dict[str, Any], at: str, depth: int) -> dict[Any, Any]:
        pairs = [self._items(pair, at, depth) for pair in _typed(list, config["dict"], at)]
        return dict(pairs)

    def _dtype(self, config: dict[str, Any], at: str, depth: int) -> torch.dtype:
        return _typed(torch.dtype, getattr(torch, _typed(str, config["dtype"], at), None), at)

    def _set(self, config: dict[str, Any], at: str, depth: int) -> LabeledImages:
        data = LabeledImages.load(self._file(config["set"], at))
        if set_fingerprint(data) != config["set"]:
            raise ConfigError(f"{at}: the set {config['set']} in {self.store} was changed")
        return data

    def _partial(self, config: dict[str, Any], at: str, depth: int) -> functools.partial[Any]:
        function = self.decode(config["partial"], at, depth)
        args, options = self._arguments(config, at, depth)
        return functools.partial(function, *args, **options)

    def _object(self, config: dict[str, Any], at: str, depth: int) -> Any:
        kind = self._found(config["object"], config.get("source"), at)
        if not _is_constructible(kind):
            raise ConfigError(f"{at}: {config['object']} is neither a dataclass nor Configurable, so it is not built")
        args, options = self._arguments(config, at, depth)
        if not issubclass(kind, nn.Module):
            return kind(*args, **options)
        with torch.random.fork_rng(devices=[]):
            network = kind(*args, **options)
        if config.get("weights") is not None:
            network.load_state_dict(self._tensors(config["weights"], at), assign=True)
        return network.train(bool(config.get("training", True)))

    def _arguments(self, config: dict[str, Any], at: str, depth: int) -> tuple[list[Any], dict[str, Any]]:
        options = _typed(dict, config.get("with", {}), at)
        return (
            self._items(config.get("args", []), f"{at}.args", depth),
            {name: self.decode(value, f"{at}.{name}", depth) for name, value in options.items()},
        )

    def _found(self, path: Any, source: Any, at: str) -> Any:
        path = _typed(str, path, at)
        if path in self.names:
            return self.names[path]
        try:
            found = _find(path, self.trust)
        except LookupError as error:
            module = path.partition(":")[0]
            raise ConfigError(
                f"{at} names {path!r}, which {error}; if you know that it is harmless, pass "
                f"names={{{path!r}: ...}}, or trust=[{module!r}] for everything that this module defines"
            ) from error
        if source is not None and _source(found).get("source", source) != source:
            warn(
                f"the source code of {path} has changed since it was recorded, so the result may differ; "
                f"restore that version, or pass the right one with names={{{path!r}: ...}}"
            )
        return found

    def _tensors(self, fingerprint: Any, at: str) -> dict[str, Tensor]:
        path = self._file(fingerprint, at)
        tensors, metadata = read_tensors(path, kind=_FORMAT, content="tensors of a config")
        tensors = {name: tensors[name] for name in json.loads(metadata["order"])}
        if _fingerprint(tensors) != fingerprint:
            raise ConfigError(f"{at}: the tensors in {path} were changed")
        return tensors

    def _file(self, fingerprint: Any, at: str) -> Path:
        if not re.fullmatch("[0-9a-f]{32}", _typed(str, fingerprint, at)):
            raise ConfigError(f"{at}: a fingerprint must have 32 hex digits, got {fingerprint!r}")
        if self.store is None:
            raise ConfigError(f"{at} needs {fingerprint}.safetensors: pass store=, the folder that `to_config` filled")
        return self.store / f"{fingerprint}.safetensors"


_Rule = Callable[[_Decoder, dict[str, Any], str, int], Any]
_KINDS: dict[str, tuple[tuple[str, ...], _Rule]] = {
    "float": ((), _Decoder._float),
    "tuple": ((), lambda self, config, at, depth: tuple(self._items(config["tuple"], at, depth))),
    "size": ((), lambda self, config, at, depth: torch.Size(self._items(config["size"], at, depth))),
    "dict": ((), _Decoder._dict),
    "range": ((), lambda self, config, at, depth: range(*_typed(list, config["range"], at))),
    "path": ((), lambda self, config, at, depth: Path(_typed(str, config["path"], at))),
    "dtype": ((), _Decoder._dtype),
    "device": ((), lambda self, config, at, depth: torch.device(_typed(str, config["device"], at))),
    "tensor": ((), lambda self, config, at, depth: self._tensors(config["tensor"], at)["tensor"]),
    "tensors": ((), lambda self, config, at, depth: self._tensors(config["tensors"], at)),
    "set": ((), _Decoder._set),
    "name": (("source",), lambda self, config, at, depth: self._found(config["name"], config.get("source"), at)),
    "partial": (("args", "with"), _Decoder._partial),
    "object": (("source", "args", "with", "weights", "training"), _Decoder._object),
}
"""Key of each kind of value, with the further keys that it may have and the function that decodes it."""


def _linked(shared: str | Path | None, folder: Path, file: str) -> bool:
    """Create a hard link in `folder` to a file in the folder `shared`, and return whether it worked.

    Both folders hold saved tensors and sets. If `shared` is None, no link is created.

    A link suffices, because saved files never change.
    """
    if shared is None:
        return False
    try:
        os.link(Path(shared) / file, folder / file)
    except OSError:  # no such file, or a file system without links
        return False
    return True


def _typed(kind: type, value: Any, at: str) -> Any:
    if not isinstance(value, kind):
        raise ConfigError(f"{at} must hold a {kind.__name__}, got {type(value).__name__}")
    return value


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return the fingerprint of a mapping from names to tensors. It depends on the order of the names."""
    return tensor_fingerprint([part for name, tensor in tensors.items() for part in (name, tensor)])


def _is_new_default(value: Any, option: Field[Any]) -> bool:
    """Return whether a dataclass field has its default value and is marked `omit_default`.

    Such fields are left out of configs, because configs that were saved before the field existed do not have it.
    """
    return bool(option.metadata.get("omit_default")) and getattr(value, option.name) == option.default


def _is_importable(value: Any) -> bool:
    """Return whether `value` is a function, class or named constant that can be found by its module and name."""
    if isinstance(value, types.FunctionType | type) or _is_entry(value):
        module = sys.modules.get(value.__module__)
        return module is not None and _attribute(module, value.__qualname__) is value
    return False


def _is_entry(value: Any) -> bool:
    """Return whether `value` is a named constant: an object that stores its own name in `__qualname__`.

    For example, the `Entry` objects that methods, add-ons and filters of `fl` declare as class attributes are named
    constants.
    """
    own = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
    return not callable(value) and isinstance(own.get("__qualname__"), str)


def _path_of(value: Any) -> str:
    """Return "module:name" of a function or class.

    For distillkit and PyTorch, the module is the shortest one that exports the object, so that configs remain valid if
    the defining file moves.
    """
    module, name = value.__module__, value.__qualname__
    if module in _SCRIPT_MODULES:
        return f"__main__:{name}"
    parts, first = module.split("."), name.split(".")[0]
    for package in [".".join(parts[:n]) for n in range(1, len(parts))] if parts[0] in _KNOWN_PACKAGES else []:
        found = sys.modules.get(package)
        if first in getattr(found, "__all__", ()) and _attribute(found, name) is value:
            return f"{package}:{name}"
    return f"{module}:{name}"


def _source(value: Any) -> dict[str, str]:
    """Return {"source": hash of the source code} for a user's own function or class.

    Return {} if `value` belongs to a known package, is a named constant, or has no available source code.
    """
    if value.__module__.split(".")[0] in _KNOWN_PACKAGES or _is_entry(value):
        return {}
    try:
        text = inspect.getsource(value)
    except (OSError, TypeError):
        return {}
    return {"source": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}


def _is_constructible(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Configurable))


def _find(path: str, trust: Collection[str]) -> Any:
    """Return the function, class or named constant with the given "module:name".

    Args:
        path: "module:name".
        trust: names of the user's modules from which objects are accepted.

    Raises:
        LookupError: the object is not found, or is not accepted. The message is only the end of a sentence, such as
            "does not exist". The caller puts the path in front of it.
    """
    module, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise LookupError("does not have the form module:name")
    if module == "__main__":
        scripts = (_attribute(sys.modules.get(m), name) for m in _SCRIPT_MODULES)
        return _defined_in(next((v for v in scripts if v is not None), None), _SCRIPT_MODULES, name)
    if module in trust:
        return _defined_in(_attribute(_import(module), name), (module,), name)
    if (
        module.split(".")[0] in _OWN_PACKAGES
        or _in_package(module, "torch.nn")
        or _in_package(module, "torchvision.models")
    ):
        found = _attribute(_import(module), name)
        if found is None:
            raise LookupError("does not exist (any more)")
        if not _is_allowed(found):
            raise LookupError("is no network, component class or pure function, so a config may not name it")
        return found
    raise LookupError("is outside of this toolkit")


def _defined_in(value: Any, modules: Collection[str], name: str) -> Any:
    importable = isinstance(value, types.FunctionType | type) or (value is not None and _is_entry(value))
    if not importable or value.__module__ not in modules or value.__qualname__ != name:
        raise LookupError("is not a function or class defined at the top level of that module")
    return value


def _is_allowed(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    ours = module.split(".")[0] in _OWN_PACKAGES
    if isinstance(value, type):
        known = ours or _in_package(module, "torch.nn.modules") or _in_package(module, "torchvision.models")
        return known and (issubclass(value, nn.Module) or (ours and _is_constructible(value)))
    if _is_entry(value):
        return ours
    if not isinstance(value, types.FunctionType):
        return False
    if module == "torch.nn.functional" or _in_package(module, "torchvision.models"):
        return True
    return module not in _EXCLUDED_MODULES and any(_in_package(module, f"distillkit.{p}") for p in _FUNCTION_PACKAGES)


def _in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LookupError(f"cannot be imported ({error})") from error


def _attribute(module: Any, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        return None


def _described(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    if name is None or not callable(value):
        return f"a {type(value).__qualname__}"
    if "<lambda>" in name:
        return "a lambda"
    return f"the nested function {name}" if "<locals>" in name else f"{name}, a {type(value).__name__}"


def _remedy(value: Any) -> str:
    name = getattr(value, "__qualname__", "") if callable(value) else ""
    partial = "functools.partial(ConvNet, (3, 32, 32), width=32)"
    if "<lambda>" in name:
        return f"use {partial}, or a function at the top level of a module"
    if "<locals>" in name:
        return f"define it at the top level of a module, or use {partial} for its arguments"
    if isinstance(value, torch.Generator):
        return "pass the seed instead"
    if isinstance(value, np.ndarray):
        return "pass torch.from_numpy(array)"
    if isinstance(value, nn.Module):
        return (
            f"derive {type(value).__qualname__} from distillkit.serialization.Configurable, or pass its factory, as "
            f"{partial}"
        )
    if "<locals>" in type(value).__qualname__:
        return "define its class at the top level of a module"
    return "make its class a frozen dataclass, or derive it from distillkit.serialization.Configurable"
