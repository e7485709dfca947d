"""Objects built again from JSON, so that no file can name what was not meant to be built or called."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distillkit._sanity_checks import warn
from distillkit._utils import check
from distillkit._utils.files import read_tensors
from distillkit.fingerprint import set_fingerprint
from distillkit.recipes.names import builds, find, source_of
from distillkit.recipes.saying import KIND, tensors_fingerprint
from distillkit.sets import LabeledImages

__all__ = ["NotMade", "made"]

_DEPTH = 100


class NotMade(ValueError):
    """A recipe cannot be followed: the message says where in it, and what to pass or to do."""


def made(
    said: Any,
    *,
    store: str | Path | None = None,
    names: Mapping[str, Any] | None = None,
    trust: Collection[str] = (),
) -> Any:
    """The value that `recipe` said, built again.

    A file cannot make this import or call arbitrary code. Functions and classes are looked up by name in `names`; then
    in this toolkit (its components' classes, networks, and functions that compute), `torch.nn`, `torch.nn.functional`
    and `torchvision.models`; in the script that was started; in the modules of `trust`. Only dataclasses and `Recorded`
    classes are called. What a file may do is choose among these and their arguments.

    Args:
        said: what `recipe` gave, as `json.loads` reads it.
        store: the folder of its tensors and sets.
        names: functions and classes of yours by the names that the recipe has for them: `{"models:small": small}`.
        trust: your modules whose own functions and classes may be named: `["models"]`. They are imported.

    Raises:
        NotMade: an unknown kind, a name that is not found or not allowed, a missing or changed file of tensors, a
            class that does not take these arguments any more. A `ValueError`.

    Warns:
        Of a function or class of yours that is written otherwise than when the recipe was made.
    """
    return _Making(
        None if store is None else Path(store),
        check.mapping(names or {}, "names"),
        check.several(list(trust), "trust", "names of modules") if not isinstance(trust, str) else (trust,),
    ).make(said, "recipe", 0)


class _Making:
    def __init__(self, store: Path | None, names: Mapping[str, Any], trust: Collection[str]) -> None:
        self.store, self.names, self.trust = store, names, trust

    def make(self, said: Any, at: str, depth: int) -> Any:
        if depth > _DEPTH:
            raise NotMade(f"{at[:80]}... is nested deeper than {_DEPTH} levels")
        if said is None or type(said) in (bool, int, float, str):
            return said
        if type(said) is list:
            return self._all(said, at, depth)
        if type(said) is not dict:
            raise NotMade(f"{at} is a {type(said).__name__}, which is not JSON")
        kinds = [kind for kind in _KINDS if kind in said]
        if len(kinds) != 1:
            raise NotMade(
                f"{at} is of no known kind, with the keys {', '.join(map(repr, said)) or 'none'}; known are "
                f"{', '.join(_KINDS)}: it is damaged, or another version of distillkit wrote it"
            )
        extra = [key for key in said if key not in (kinds[0], *_KINDS[kinds[0]][0])]
        if extra:
            raise NotMade(f"{at} has {extra[0]!r} beside {kinds[0]!r}, which this version of distillkit does not know")
        try:
            return _KINDS[kinds[0]][1](self, said, at, depth + 1)
        except NotMade:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError, RuntimeError, OSError) as error:
            raise NotMade(f"{at} cannot be built again: {error}") from error

    def _all(self, said: Any, at: str, depth: int) -> list[Any]:
        return [self.make(v, f"{at}[{i}]", depth + 1) for i, v in enumerate(_a(list, said, at))]

    def _float(self, said: dict[str, Any], at: str, depth: int) -> float:
        check.one_of(said["float"], at, ("nan", "inf", "-inf"))
        return float(said["float"])

    def _tuple(self, said: dict[str, Any], at: str, depth: int) -> tuple[Any, ...]:
        return tuple(self._all(said["tuple"], at, depth))

    def _size(self, said: dict[str, Any], at: str, depth: int) -> torch.Size:
        return torch.Size(self._all(said["size"], at, depth))

    def _dict(self, said: dict[str, Any], at: str, depth: int) -> dict[Any, Any]:
        pairs = [self._all(pair, at, depth) for pair in _a(list, said["dict"], at)]
        return dict(pairs)

    def _range(self, said: dict[str, Any], at: str, depth: int) -> range:
        return range(*_a(list, said["range"], at))

    def _path(self, said: dict[str, Any], at: str, depth: int) -> Path:
        return Path(_a(str, said["path"], at))

    def _dtype(self, said: dict[str, Any], at: str, depth: int) -> torch.dtype:
        return _a(torch.dtype, getattr(torch, _a(str, said["dtype"], at), None), at)

    def _device(self, said: dict[str, Any], at: str, depth: int) -> torch.device:
        return torch.device(_a(str, said["device"], at))

    def _tensor(self, said: dict[str, Any], at: str, depth: int) -> Tensor:
        return self._read(said["tensor"], at)["tensor"]

    def _tensors(self, said: dict[str, Any], at: str, depth: int) -> dict[str, Tensor]:
        return self._read(said["tensors"], at)

    def _set(self, said: dict[str, Any], at: str, depth: int) -> LabeledImages:
        data = LabeledImages.load(self._file(said["set"], at))
        if set_fingerprint(data) != said["set"]:
            raise NotMade(f"{at}: the set {said['set']} in {self.store} was changed")
        return data

    def _named(self, said: dict[str, Any], at: str, depth: int) -> Any:
        return self._found(said["name"], said.get("source"), at)

    def _partial(self, said: dict[str, Any], at: str, depth: int) -> functools.partial[Any]:
        function = self.make(said["partial"], at, depth)
        given, named = self._arguments(said, at, depth)
        return functools.partial(function, *given, **named)

    def _object(self, said: dict[str, Any], at: str, depth: int) -> Any:
        kind = self._found(said["object"], said.get("source"), at)
        if not builds(kind):
            raise NotMade(f"{at}: {said['object']} is no dataclass and no Recorded class, so a file may not build it")
        given, named = self._arguments(said, at, depth)
        if not issubclass(kind, nn.Module):
            return kind(*given, **named)
        with torch.random.fork_rng(devices=[]):
            network = kind(*given, **named)
        if said.get("weights") is not None:
            network.load_state_dict(self._read(said["weights"], at), assign=True)
        return network.train(bool(said.get("training", True)))

    def _arguments(self, said: dict[str, Any], at: str, depth: int) -> tuple[list[Any], dict[str, Any]]:
        named = _a(dict, said.get("with", {}), at)
        return (
            self._all(said.get("args", []), f"{at}.args", depth),
            {name: self.make(value, f"{at}.{name}", depth) for name, value in named.items()},
        )

    def _found(self, path: Any, source: Any, at: str) -> Any:
        path = _a(str, path, at)
        if path in self.names:
            return self.names[path]
        try:
            found = find(path, self.trust)
        except LookupError as error:
            module = path.partition(":")[0]
            raise NotMade(
                f"{at} names {path!r}, which {error}; if you know it and it is harmless, pass "
                f"names={{{path!r}: ...}}, or for all that this module defines trust=[{module!r}]"
            ) from error
        if source is not None and source_of(found) not in (source, None):
            warn(
                f"{path} is not written as it was when this was recorded, so what is built from it may do something "
                f"else; go back to that version, or pass the one that is meant: names={{{path!r}: ...}}"
            )
        return found

    def _read(self, fingerprint: Any, at: str) -> dict[str, Tensor]:
        path = self._file(fingerprint, at)
        tensors, facts = read_tensors(path, kind=KIND, what="tensors of a recipe")
        tensors = {name: tensors[name] for name in json.loads(facts["order"])}
        if tensors_fingerprint(tensors) != fingerprint:
            raise NotMade(f"{at}: the tensors in {path} were changed")
        return tensors

    def _file(self, fingerprint: Any, at: str) -> Path:
        if not re.fullmatch("[0-9a-f]{32}", _a(str, fingerprint, at)):
            raise NotMade(f"{at}: {fingerprint!r} is no fingerprint of 32 hex digits")
        if self.store is None:
            raise NotMade(f"{at} needs {fingerprint}.safetensors: give store=, the folder that `recipe` filled")
        return self.store / f"{fingerprint}.safetensors"


def _a(kind: type, value: Any, at: str) -> Any:
    if not isinstance(value, kind):
        raise NotMade(f"{at} must hold a {kind.__name__}, got {type(value).__name__}")
    return value


_Rule = Callable[[_Making, dict[str, Any], str, int], Any]
_KINDS: dict[str, tuple[tuple[str, ...], _Rule]] = {
    "float": ((), _Making._float),
    "tuple": ((), _Making._tuple),
    "size": ((), _Making._size),
    "dict": ((), _Making._dict),
    "range": ((), _Making._range),
    "path": ((), _Making._path),
    "dtype": ((), _Making._dtype),
    "device": ((), _Making._device),
    "tensor": ((), _Making._tensor),
    "tensors": ((), _Making._tensors),
    "set": ((), _Making._set),
    "name": (("source",), _Making._named),
    "partial": (("args", "with"), _Making._partial),
    "object": (("source", "args", "with", "weights", "training"), _Making._object),
}
"""Each kind of thing, the key that says it: what may stand beside it, and how it is built."""
